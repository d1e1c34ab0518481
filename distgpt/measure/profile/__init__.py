"""Profiles a training step: measures every operation and compares it with the machine's peak.

Not here: the step itself (core/train/step.py).
"""

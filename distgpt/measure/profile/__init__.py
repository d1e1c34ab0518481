"""Shows where a training step's time goes: every operation is measured and compared with the machine's peak.

Not here: the step itself (core/train/step.py).
"""

"""Observers and policies of a run: bad steps, stuck ranks, deadlines, full disks, metrics, logs.

`attach.py` chooses them by the settings. Not here: their interfaces and defaults (core/train/interfaces.py).
"""

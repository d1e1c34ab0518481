"""Guards against what interrupts a run: signals, bad steps, stuck ranks, a deadline, failing hardware.

Each file is one guard; `training/loop.py` calls it by name. Not here: the plain path, which the loop shows.
"""

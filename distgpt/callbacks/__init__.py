"""Guards against what interrupts a run: bad steps, stuck ranks, a deadline, a full disk, failing hardware.

`attach.py` says by the settings which of them a run has. Not here: the plain path, which knows only seams.
"""

"""What may interrupt a run: signals, bad steps, stuck ranks, a deadline, a failing disk or processor.

Each file is one guard; `training/loop.py` calls it by name. Not here: the plain path, which the loop shows.
"""

"""From a command line to a run that is ready on every rank: plan, memory, objects, weights.

Nothing is written before everything was checked. Not here: the loop that trains (`training/loop.py`).
"""

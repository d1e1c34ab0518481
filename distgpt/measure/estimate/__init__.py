"""What a run would take: parameters, FLOPs, memory and disk, counted, and time, measured.

Not here: how training chooses what fits into memory (training/sizing.py).
"""

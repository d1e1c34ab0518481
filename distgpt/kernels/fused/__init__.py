"""The loops behind cpu.py, compiled by Numba: one family of operations per file, one thread per call.

Not here: how work is cut among threads (cpu.py, pool.py), and what the operations mean (api.py).
"""

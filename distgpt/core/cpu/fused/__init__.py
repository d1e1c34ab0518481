"""The loops behind kernels.py, compiled by Numba: one family of operations per file, one thread per call.

Loops have no annotations: Numba compiles them for the types of each call. Shapes are those of api.py.

Not here: how work is cut among threads (kernels.py, pool.py), and what the operations mean (api.py).
"""

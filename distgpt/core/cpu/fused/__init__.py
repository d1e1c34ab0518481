"""Fused loops for kernels.py, compiled by Numba: a family of operations per file, a thread per call.

Loops have no annotations: Numba compiles them for the types of each call. Shapes are as in ops/api.py.

Not here: the split over threads (kernels.py, pool.py) and the definition of the operations (ops/kernels.py).
"""

"""Fused loops for kernels.py, compiled by Numba: one family of operations per file, one thread per call.

Loops have no annotations: Numba compiles them for the types of each call. Shapes are as in ops/api.py.
kernels.py and pool.py split the work over threads; ops/kernels.py defines the operations.
"""

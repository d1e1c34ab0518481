"""The operations on CPUs: kernels.py cuts them among threads, and calls compiled loops.

Loops lie, from the ground up, in compiling/ (Numba, and what is kept of it on disk), matmul/ (our own, and
the BLAS) and fused/. Not here: compiled decoding (decoding/), anything that knows communicators.
"""

"""The operations on CPUs: kernels.py cuts them among threads, and calls compiled loops.

Loops lie, from the ground up, in compiling/ (Numba, and what is kept of it on disk), matmul/ (our own, and
the BLAS), fused/ (training) and decoding/ (new tokens). Not here: anything that knows communicators.
"""

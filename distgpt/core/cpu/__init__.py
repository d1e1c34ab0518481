"""Operations on CPUs: kernels.py splits them over threads, which call compiled loops.

From the ground up: compiling/ (Numba and its disk cache), matmul/ (our own matmuls and the BLAS) and fused/.
Not here: compiled decoding (decoding/) and any use of a communicator.
"""

"""Matmul of our own: microkernels written as LLVM IR, assembled by llvmlite, driven by compiled loops.

Used in bfloat16 (kernels/cpu_bfloat16.py) and by attention; other matmuls in float32 go through the BLAS
(kernels/fused/blas.py).
Not here: what a linear layer is (kernels/api.py).
"""

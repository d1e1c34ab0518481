"""Matmul of our own: microkernels written as LLVM IR, assembled by llvmlite, driven by compiled loops.

All of bfloat16 and of attention goes through it, and float32 wherever it beats the BLAS (layers.py); float64
goes through the BLAS.
Not here: what a linear layer is (core/ops/kernels.py).
"""

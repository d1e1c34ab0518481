"""Our own matmuls: microkernels written as LLVM IR, assembled by llvmlite and called by compiled loops.

They compute everything in bfloat16, attention, and float32 if they are faster than the BLAS (layers.py). The
BLAS computes float64. Not here: the definition of a linear layer (core/ops/kernels.py).
"""

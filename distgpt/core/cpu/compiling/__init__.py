"""The compiler: loops through Numba, what is kept of them on disk, and the processor that they are for.

Not here: what is computed (matmul/, fused/, decoding/).
"""

"""Compilation of loops with Numba, their disk cache, and the properties of the processor.

Not here: the loops themselves (matmul/, fused/, decoding/).
"""

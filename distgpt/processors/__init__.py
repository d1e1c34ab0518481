"""Matmul on processors of their own kind: AMX, and AVX-512 with bfloat16.

Not here: how a matmul is cut into blocks and packed (core/cpu/matmul/).
"""

"""Matmul on processors of their own kind: AMX, AVX-512 with bfloat16, ARM; and the tiles of each processor.

Not here: how a matmul is cut into blocks and packed (core/cpu/matmul/).
"""

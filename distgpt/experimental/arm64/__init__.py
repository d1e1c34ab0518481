"""Matmul on arm64: how its registers are used, and its tiles for floats and integers.

Not here: how a matmul is cut into blocks and packed (core/cpu/matmul/).
"""

"""Loops for what adapters add to the matmuls of new tokens (decoding.py).

Not here: those of training (core/cpu/fused/low_rank.py), which layers have adapters (adapters/lora.py).
"""

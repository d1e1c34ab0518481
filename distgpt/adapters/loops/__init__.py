"""Loops for the products of adapters: in training (low_rank.py) and for new tokens (decoding.py).

Not here: which layers have adapters (adapters/lora.py).
"""

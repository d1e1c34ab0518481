"""Loops for data that ranks exchange.

Not here: loops of a step on one rank (core/cpu/fused), and the messages between ranks
(parallel/reductions.py).
"""

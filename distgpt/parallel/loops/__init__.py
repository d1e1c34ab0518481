"""Loops for what ranks send each other.

Not here: loops of a step on one rank (core/cpu/fused), and who sends what to whom (parallel/reductions.py).
"""

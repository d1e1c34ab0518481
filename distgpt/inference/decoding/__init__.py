"""Faster ways to decode than the core's plain one: compiled on CPUs, and many sequences in a pass on GPUs.

Not here: the plain way and the engine (core/generate/), which tokens are chosen (core/generate/sampling.py).
"""

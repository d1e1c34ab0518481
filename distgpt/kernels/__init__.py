"""Kernels on CPUs: the vocabulary of operations that a GPT is made of (api.py).

Once as plain array code, which defines "correct" (reference.py), once fused and compiled (cpu.py, fused/).
Not here: CUDA (gpu/), and anything that knows communicators.
"""

"""The operations that a GPT is made of: their types (api.py), and their definitions (kernels.py).

Not here: how they are made fast on CPUs (core/cpu/) and on GPUs (gpu/).
"""

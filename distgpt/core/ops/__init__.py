"""The operations that a GPT is made of: their names and shapes (api.py), and what they mean (reference.py).

Not here: how they are made fast on CPUs (core/cpu/) and on GPUs (gpu/).
"""

"""The operations of a GPT: their types (api.py) and reference implementations (kernels.py).

Not here: fast versions for CPUs (core/cpu/) and GPUs (gpu/).
"""

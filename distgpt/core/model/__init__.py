"""The model: memory for its tensors, its layers, passes over a batch, and its optimizers.

Written in the vocabulary of core/ops/kernels.py alone, so that it is the same on every backend.
Not here: files (saved/), batches (data/), and the training loop (train/).
"""

"""The model: memory for its tensors, its layers, passes over a batch, and its optimizers.

It uses only the operations of core/ops/kernels.py, so it is the same on every backend. Not here: files
(saved/), batches (data/), and the training loop (train/).
"""

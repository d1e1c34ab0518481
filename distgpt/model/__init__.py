"""The model: memory for its tensors, its layers, passes over a batch, AdamW, and text from it.

Written in the vocabulary of kernels/api.py alone, so that it is the same on every backend.
Not here: files (saved/), batches (data/), and the training loop (training/).
"""

"""Text from a model: sequences in a cache, the choice of tokens, requests served side by side.

Not here: operations (kernels/), passes over a batch (model/), what commands read and print (infer.py).
"""

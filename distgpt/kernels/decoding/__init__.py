"""New tokens of many sequences in one compiled call: packed weights, and one pass over all layers.

losses.py goes through them without a cache, for the losses of many short sequences.

Not here: which tokens come when (inference/), the operations that training shares (fused/, matmul/).
"""

"""New tokens of many sequences in one compiled call: packed weights, and one pass over all layers.

Not here: which tokens come when (core/generate/), the loops that training shares (core/cpu/).
"""

"""Decoding of multiple sequences in one compiled call: packed weights, and one pass over all layers.

Scheduling is in core/generate/, loops shared with training in core/cpu/.
"""

"""Fast decoding, compiled on CPUs and batched on GPUs.

Plain decoding, the engine and sampling are in core/generate/.
"""

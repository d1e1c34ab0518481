"""Weights in int8 and int4, for inference on CPUs: rounding, microkernels, operands of the decoder.

Not here: how they are stored (saved/rounded.py), and models of them (model/packed.py).
"""

"""Loops and microkernels for weights in int8 and int4, compiled by Numba.

Not here: models of such weights (models/quantized/packed.py), their files (models/quantized/rounded.py).
"""

"""Loops and microkernels for weights in int8 and int4, compiled by Numba.

Not here: models of such weights (rounded/packed.py), their files (rounded/rounded.py).
"""

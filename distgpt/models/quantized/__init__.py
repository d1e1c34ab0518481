"""Weights in int8 and int4, for inference on CPUs: rounding, files, microkernels, operands of the decoder.

Not here: bfloat16, in which models are trained too (core/).
"""

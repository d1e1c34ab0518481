"""int8 and int4 weights in inference: kernels, microkernels and rounding.

The models are in models/quantized/packed.py, their files in models/quantized/rounded.py.
"""

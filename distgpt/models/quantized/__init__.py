"""int8 and int4 weights, for inference on CPUs: rounding and files.

bfloat16, which is also for training, is in core/.
"""

"""All CUDA code: the device, CUDA kernels and their launchers, vendor libraries, sums between GPUs.

This is the only package that imports CuPy. Its CUDA sources are in cu/. Not here: the model, which calls
these kernels through the interface of core/ops/kernels.py.
"""

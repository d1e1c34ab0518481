"""Everything CUDA: the device, our kernels and their launchers, vendor libraries, sums between GPUs.

The only folder that loads CuPy; its CUDA sources lie in cu/.
Not here: the model, which calls these kernels by the vocabulary of core/ops/kernels.py.
"""

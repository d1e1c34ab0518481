"""Communicators: how the ranks of one job exchange arrays, agree, and leave together.

One process or MPI; a model never knows which one it runs under.
Not here: the exchange between GPUs (gpu/), and anything that knows kernels.
"""

"""Communicators: how the ranks of a job exchange arrays, agree, and shut down.

A model is the same with one process and with MPI.

Not here: communication between GPUs (gpu/), and anything that depends on kernels.
"""

"""Kernels: the operations a GPT is made of, once as plain array code and once fused per kind of hardware."""

"""Code never seen to work on its hardware: arm64's microkernels, and matmuls of GPUs that read float8.

Its tests run as all others do, on qemu and a stand-in for GPUs. docs/explanation/experimental.md says what a
run has to show before a file leaves this folder. Not here: what other processors and GPUs have answered.
"""

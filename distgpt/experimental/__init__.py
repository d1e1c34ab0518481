"""Code never seen to work on its hardware: arm64's microkernels.

Its tests run under qemu. docs/explanation/experimental.md says what a run has to show before a file leaves
this folder. Not here: what other processors have answered.
"""

"""The GPU's kernels against the reference, in all types; without a GPU, on this machine's processor."""

import pytest
from devices import cuda_kernels  # noqa: F401
from operations import *  # noqa: F403
from operations import SHAPES, Case, case  # noqa: F401

from distgpt.kernels.reference import ReferenceKernels


@pytest.fixture(params=["float64", "float32", "bfloat16"])
def both(request, cuda_kernels):
    return ReferenceKernels("float64"), cuda_kernels(request.param)

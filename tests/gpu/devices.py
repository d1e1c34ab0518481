"""What tests of GPU code run on: this machine's processor, or with DISTGPT_TEST_GPU=1 a real GPU."""

import functools
import os

import pytest
from hostbuild import COMPILER
from hostdevice import HostDevice
from hostproducts import HostProducts

from distgpt.config import GpuConfig
from distgpt.gpu.kernels import CudaKernels

ON_GPU = os.environ.get("DISTGPT_TEST_GPU") == "1"


class Unrecorded(HostDevice):
    """Work is done each time as it comes, as without CUDA graphs."""

    def record(self, work):
        return work


def device(graphs=True, deterministic=False):
    """One for all tests that want the same."""
    return _device(graphs, deterministic)


@functools.cache
def _device(graphs, deterministic):
    if ON_GPU:
        from distgpt.gpu.accelerator import open_device

        return open_device(0, GpuConfig(graphs=graphs, deterministic=deterministic))
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on the processor")
    return HostDevice() if graphs else Unrecorded()


@functools.cache
def kernels(dtype, graphs=True, deterministic=False):
    """The vocabulary on that device, in a type."""
    on = device(graphs, deterministic)
    if ON_GPU:
        from distgpt.gpu.accelerator import kernels_on

        return kernels_on(on, dtype, GpuConfig(graphs=graphs, deterministic=deterministic), print)
    return CudaKernels(on, HostProducts(on), dtype)


@pytest.fixture
def any_device():
    return device()


@pytest.fixture
def cuda_kernels():
    """A function from the name of a type, and how to work, to kernels."""
    return kernels

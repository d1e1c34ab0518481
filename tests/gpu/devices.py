"""What tests of GPU code run on: this machine's processor, or with DISTGPT_TEST_GPU=1 a real GPU."""

import functools
import os
import sys
from pathlib import Path

import pytest
from conftest import SMALL, distgpt
from hostbuild import COMPILER, build_cublaslt
from hostdevice import HostDevice
from hostmatmul import HostMatmul

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
    return CudaKernels(on, HostMatmul(on), dtype)


@pytest.fixture
def any_device():
    return device()


@pytest.fixture
def cuda_kernels():
    """A function from the name of a type, and how to work, to kernels."""
    return kernels


@pytest.fixture(scope="session")
def gpu():
    """A function that runs a command where GPUs seem to be."""
    if ON_GPU:
        return distgpt
    program, library = [sys.executable, str(Path(__file__).with_name("wholegpu.py"))], lt_library()

    def run(*args, gpus=1, **how):
        return distgpt(*args, program=program, env={"WHOLE_GPU": f"{library}:{gpus}"}, **how)

    return run


def lt_library():
    """The library that stands in for cuBLASLt."""
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on the processor")
    return build_cublaslt()


SAME = SMALL[: SMALL.index("--threads")] + SMALL[SMALL.index("--threads") + 2 :]


def gpu_train(gpu, out, *args, ranks=0, **how):
    """The small model's training in a GPU stage, which must succeed."""
    stage = "mpi-cuda" if ranks else "cuda"
    result = gpu("train", *SAME, "--stage", stage, "--out", out, *args, ranks=ranks, **how)
    assert result.returncode == 0, result.stderr
    return result

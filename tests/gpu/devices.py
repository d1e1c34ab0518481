"""Devices for tests of GPU code: the processor, or a real GPU with DISTGPT_TEST_GPU=1."""

import functools
import os
import sys
from pathlib import Path

import pytest
from distgpt.core.config import GpuConfig
from distgpt.gpu import stage
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from hostbuild import COMPILER
from hostgpu import HostDevice, host_lt, install

from conftest import SMALL, distgpt, inside

ON_GPU = os.environ.get("DISTGPT_TEST_GPU") == "1"
needs_device = pytest.mark.skipif(
    not ON_GPU and COMPILER is None, reason="needs g++ to run the kernels on the processor"
)
needs_the_processor = pytest.mark.skipif(ON_GPU or COMPILER is None, reason="needs g++, and no GPU")


def device(graphs=True, deterministic=False) -> CupyDevice:
    """Return the shared device; equal arguments give the same one."""
    return _device(graphs, deterministic)


@functools.cache
def _device(graphs, deterministic):
    if ON_GPU:
        return stage.open_device(0, GpuConfig(graphs=graphs, deterministic=deterministic))
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on the processor")
    return HostDevice(graphs=graphs)


@functools.cache
def kernels(dtype, graphs=True, deterministic=False):
    on = device(graphs, deterministic)
    if ON_GPU:
        options = GpuConfig(graphs=graphs, deterministic=deterministic)
        return poisoning(stage.kernels_on(on, dtype, options, print))
    return poisoning(CudaKernels(on, LtMatmul(host_lt(on.xp), on), dtype))


def poisoning(kernels):
    """Fill scratch memory with NaN before each operation."""
    launcher = kernels.launcher
    scratch, device = launcher.scratch, launcher.device

    def poisoned(*args):
        array = scratch(*args)
        array.data.memset_async(0xFF, array.nbytes, device.stream)
        return array

    launcher.scratch = poisoned
    return kernels


@pytest.fixture
def cuda_kernels():
    return kernels


@pytest.fixture
def gpu():
    """Return a function that runs a command with emulated GPUs, in this process unless it has ranks."""
    if ON_GPU:
        return lambda *args, gpus=1, **how: distgpt(*args, **how)
    if COMPILER is None:
        pytest.skip("needs g++ to run the kernels on the processor")
    program = [sys.executable, str(Path(__file__).with_name("hostgpu.py"))]

    def run(*args, gpus=1, ranks=0):
        if ranks:
            return distgpt(*args, ranks=ranks, program=program, env={"WHOLE_GPU": str(gpus)})
        with install(gpus):
            return inside(*args)

    return run


SAME = SMALL[: SMALL.index("--threads")] + SMALL[SMALL.index("--threads") + 2 :]


def gpu_train(gpu, out, *args, ranks=0, **how):
    """Train the small model in a GPU stage."""
    stage = "mpi-cuda" if ranks else "cuda"
    result = gpu("train", *SAME, "--stage", stage, "--out", out, *args, ranks=ranks, **how)
    assert result.returncode == 0, result.stderr
    return result

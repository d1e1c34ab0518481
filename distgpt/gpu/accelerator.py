"""Open a GPU: the device, its libraries for matmuls and attention, the kernels on top."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

from distgpt.core.base.errors import Say, UsageError, first_line
from distgpt.core.config import GpuConfig
from distgpt.gpu import cublaslt, cudnn_attention, probe
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.cudnn_attention import SLOWER, CudnnAttention
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul

# An imaginary GPU is an H200: the size of partial sums depends on its multiprocessors; its capability is 9.0.
ESTIMATED_BYTES, ESTIMATED_MULTIPROCESSORS = 141 << 30, 132


def gpu_count() -> int:
    """Count the GPUs visible to this process."""
    xp: Any = import_module("cupy")
    return int(xp.cuda.runtime.getDeviceCount())


def open_device(index: int, options: GpuConfig) -> CupyDevice:
    """Open the GPU of this number and make it current."""
    known = probe.driver()
    uuid = known.gpus[index].uuid if known and index < len(known.gpus) else ""
    with _one_line(index):
        return CupyDevice(index, options.deterministic, options.graphs, uuid=uuid)


@contextmanager
def _one_line(index: int) -> Iterator[None]:
    """Turn what CUDA says of a GPU that cannot be used into one line."""
    try:
        yield
    except Exception as error:  # of CuPy's types, which need CuPy to be named
        if not type(error).__module__.startswith("cupy"):
            raise
        raise UsageError(
            f"GPU {index} cannot be used: {first_line(error)}; nvidia-smi shows whether another process has"
            " it or its memory, and CUDA_VISIBLE_DEVICES chooses another GPU"
        ) from error


def kernels_on(device: CupyDevice, dtype: str, options: GpuConfig, say: Say) -> CudaKernels:
    """Make the kernels on this device; `say` reports what is slower than it could be."""
    attention = partial(_attention_for, device, say) if dtype == "bfloat16" else None
    with _one_line(device.index):
        if (lt := cublaslt.load()) is None:
            missing = "cuBLASLt was not found: pip install nvidia-cublas (nvidia-cublas-cu12 for CUDA 12)"
            raise UsageError(missing)
        device.keep_choices(lt.version, options.tf32)
        matmuls = LtMatmul(lt, device, options.tf32, device.kept)
    return CudaKernels(device, matmuls, dtype, attention)


def kernels_for_estimate(dtype: str, memory: int | None) -> CudaKernels:
    """Make kernels of an imaginary GPU with this much memory, for estimates only: they cannot compute."""
    total = memory or ESTIMATED_BYTES
    device = SimpleNamespace(
        multiprocessors=ESTIMATED_MULTIPROCESSORS, capability=(9, 0), memory=lambda: (total, total)
    )
    return CudaKernels(cast(CupyDevice, device), cast(LtMatmul, None), dtype)


def _attention_for(device: CupyDevice, say: Say, head: int, own: OwnAttention) -> OwnAttention:
    """Choose cuDNN attention for a head size, or our own with a note that gives the reason."""
    cuda = device.xp.cuda.runtime.runtimeGetVersion() // 1000
    reason = cudnn_attention.why_not(head, device.capability, cuda)
    if reason is None:
        return CudnnAttention(own.launcher, say)
    say(f"{SLOWER}: {reason}")
    return own

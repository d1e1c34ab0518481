"""Open a GPU: the device, its libraries for matmuls and attention, the kernels on top."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from distgpt.config import GpuConfig
from distgpt.errors import UsageError
from distgpt.gpu import cublaslt, cudnn_attention
from distgpt.gpu.api import Array, Attention, Device, MatmulLibrary
from distgpt.gpu.cudnn_attention import CudnnAttention, CudnnRefusal
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.launching import address
from distgpt.gpu.matmul import LtMatmul, workspace_for

Say = Callable[[str], None]

ON_PAPER = 132  # multiprocessors of an H200: the size of partial sums depends on it
SLOWER = "attention runs on our own kernels, which should be slower than cuDNN's"


def gpu_count() -> int:
    """Count the GPUs visible to this process."""
    xp: Any = import_module("cupy")
    return int(xp.cuda.runtime.getDeviceCount())


def open_device(index: int, options: GpuConfig) -> CupyDevice:
    """Open the GPU of this number and make it current."""
    return CupyDevice(index, options.deterministic, options.graphs)


def kernels_on(device: CupyDevice, dtype: str, options: GpuConfig, say: Say) -> CudaKernels:
    """Make the kernels on this device; `say` reports what is slower than it could be."""
    attention = AttentionChoice(device, options.deterministic, say) if dtype == "bfloat16" else None
    return CudaKernels(device, _matmuls(device, options), dtype, attention)


def kernels_on_paper(dtype: str) -> CudaKernels:
    """Make kernels without a GPU, to count memory with: they cannot compute."""
    device = SimpleNamespace(multiprocessors=ON_PAPER)
    return CudaKernels(cast(Device, device), cast(MatmulLibrary, None), dtype)


def _matmuls(device: CupyDevice, options: GpuConfig) -> MatmulLibrary:
    lt = cublaslt.load()
    if lt is None:
        raise UsageError("cuBLASLt was not found: pip install nvidia-cublas (nvidia-cublas-cu12 for CUDA 12)")
    workspace = device.zeros((workspace_for(device.capability[0]),), np.dtype(np.uint8))
    return LtMatmul(
        lt,
        stream=device.stream.ptr,
        workspace=workspace,
        deterministic=options.deterministic,
        pointer=address,
        timer=device.seconds,
        keep=device.keep,
        tf32=options.tf32,
    )


class AttentionChoice:
    """Choose cuDNN attention for a head size, or our own with a note that gives the reason."""

    def __init__(self, device: CupyDevice, deterministic: bool, say: Say) -> None:
        self._device, self._deterministic, self._say = device, deterministic, say

    def __call__(self, head: int, own: Attention) -> Attention:
        cuda = self._device.xp.cuda.runtime.runtimeGetVersion() // 1000
        reason = cudnn_attention.why_not(head, self._device.capability, cuda)
        if reason is not None:
            self._say(f"{SLOWER}: {reason}")
            return own
        library = CudnnAttention(self._device.stream.ptr, self._bytes, address, self._deterministic)
        return WithFallback(library, own, self._say)

    def _bytes(self, count: int) -> Any:
        return self._device.zeros((count,), np.dtype(np.uint8))


class WithFallback:
    """A library's attention, and our own for the shapes that it refuses in either pass."""

    def __init__(self, library: CudnnAttention, own: Attention, say: Say) -> None:
        self._library, self._own, self._say = library, own, say
        self._chosen: dict[tuple[int, int], Attention] = {}

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        self._for(y, seq_len, n_head).forward(y, lse, qkv, seq_len, n_head)

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> None:
        self._for(y, seq_len, n_head).backward(dqkv, dy, y, lse, qkv, seq_len, n_head)

    def _for(self, y: Array, seq_len: int, n_head: int) -> Attention:
        key = (len(y), seq_len)
        if key not in self._chosen:
            head = y.shape[1] // n_head
            try:
                self._library.prepare(len(y) // seq_len, seq_len, n_head, head, backward=True)
                self._chosen[key] = self._library
            except CudnnRefusal as refusal:
                self._say(f"{SLOWER}, for sequences of {seq_len}: {refusal}")
                self._chosen[key] = self._own
        return self._chosen[key]

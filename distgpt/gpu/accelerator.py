"""Open a GPU: the device, its libraries for matmuls and attention, the kernels on top."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

from distgpt.config import GpuConfig
from distgpt.errors import UsageError
from distgpt.gpu import cublaslt, cudnn_attention
from distgpt.gpu.api import Array, Attention
from distgpt.gpu.cudnn_attention import CudnnAttention, CudnnRefusal
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul

Say = Callable[[str], None]

ON_PAPER = 132  # multiprocessors of an H200: the size of partial sums depends on it; its capability is 9.0
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
    attention = partial(_attention_for, device, say) if dtype == "bfloat16" else None
    return CudaKernels(device, _matmuls(device, options), dtype, attention)


def kernels_on_paper(dtype: str) -> CudaKernels:
    """Make kernels without a GPU, to count memory with: they cannot compute."""
    device = SimpleNamespace(multiprocessors=ON_PAPER, capability=(9, 0))
    return CudaKernels(cast(CupyDevice, device), cast(LtMatmul, None), dtype)


def _matmuls(device: CupyDevice, options: GpuConfig) -> LtMatmul:
    lt = cublaslt.load()
    if lt is None:
        raise UsageError("cuBLASLt was not found: pip install nvidia-cublas (nvidia-cublas-cu12 for CUDA 12)")
    return LtMatmul(lt, device, options.tf32)


def _attention_for(device: CupyDevice, say: Say, head: int, own: Attention) -> Attention:
    """Choose cuDNN attention for a head size, or our own with a note that gives the reason."""
    cuda = device.xp.cuda.runtime.runtimeGetVersion() // 1000
    reason = cudnn_attention.why_not(head, device.capability, cuda)
    if reason is None:
        return WithFallback(CudnnAttention(device), own, say)
    say(f"{SLOWER}: {reason}")
    return own


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

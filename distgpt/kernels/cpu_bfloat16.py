"""The vocabulary on CPU cores in bfloat16: float32 sums and weights, everything between layers in 16 bits.

Arrays of `dtype` are of type uint16 and hold bits, as NumPy has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgpt.kernels.api import Array
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.fused import rowwise
from distgpt.kernels.fused.bits import BITS, to_bits, to_float32
from distgpt.kernels.matmul.layers import Matmuls, OwnMatmuls


class Bfloat16Kernels(CpuKernels):
    """CpuKernels whose `dtype` is bfloat16, and whose matmuls are our own."""

    logits_bytes = 64 << 20
    few = 4
    loss_loop = staticmethod(rowwise.cross_entropy_narrow)

    def __init__(self, threads: int = 1) -> None:
        super().__init__("float32", threads)
        self.dtype = BITS

    def _matmuls(self, matmul: str) -> Matmuls:
        return OwnMatmuls(self._pool, BITS)

    # -- arrays

    def to_host(self, array: Array) -> Any:
        return to_float32(array) if array.dtype == BITS else array

    def later(self, array: Array) -> Callable[[], Any]:
        taken = array.copy()
        return lambda: self.to_host(taken)

    def put(self, array: Array, host: Any) -> None:
        if array.dtype != BITS:
            array[...] = host
            return
        array[...] = to_bits(np.asarray(host))

    def round(self, low: Array, wide: Array) -> None:
        self._pool.ranges(len(low), 4096, rowwise.rounded, low, wide)

    def add(self, y: Array, a: Array, b: Array) -> None:
        if y.dtype == BITS:
            self._pool.ranges(y.size, 4096, rowwise.add, *(x.reshape(-1) for x in (y, a, b)))
        else:
            super().add(y, a, b)

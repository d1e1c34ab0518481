"""The peaks of a backend, measured through its operations: matmuls, and moving memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distgpt.doctor.speed import matmul_rate, seconds_of
from distgpt.gpu.api import TYPE_OF
from distgpt.kernels.api import Kernels
from distgpt.kernels.cpu import CpuKernels

SECONDS, OF_MATMULS = 2.4, 2 / 3  # of measuring, and the part of it for matmuls
MEMORY_BYTES = 64 << 20  # of each array of a worker: more than caches hold


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of all workers of one rank together, measured while the other ranks did the same."""

    gflops: float
    gbytes_per_s: float
    dtype: str

    def or_higher(self, other: Peaks) -> Peaks:
        """Return the higher of each, of two measurements of which either may have been disturbed."""
        gbytes = max(self.gbytes_per_s, other.gbytes_per_s)
        return Peaks(max(self.gflops, other.gflops), gbytes, self.dtype)


def measure_peaks(
    kernels: Kernels, seconds: float | None = None, meet: Callable[[], None] = lambda: None
) -> Peaks:
    """Time matmuls and memory for about `seconds` (SECONDS if None), at least once each, after compiling.

    `meet` returns once all ranks have called it, so that all measure at the same time.
    """
    limit = SECONDS if seconds is None else seconds
    dtype = TYPE_OF[np.dtype(kernels.dtype)]
    meet()
    matmuls = matmul_rate(kernels, limit * OF_MATMULS)
    meet()
    return Peaks(matmuls / 1e9, _memory(kernels, limit * (1 - OF_MATMULS)) / 1e9, dtype)


def _memory(k: Kernels, seconds: float) -> float:
    """Return bytes per second of y ← y + b, each worker with arrays of its own.

    On cores never of bfloat16, whose rounding would take longer than the memory.
    """
    zeros = k.wide_zeros if isinstance(k, CpuKernels) else k.zeros
    count = MEMORY_BYTES // zeros(1).itemsize
    pairs = [(zeros(count), zeros(count)) for _ in range(k.threads)]

    def one(worker: int) -> None:
        y, b = pairs[worker]
        k.add(y, y, b)

    def own(worker: int) -> None:
        y, b = pairs[worker]
        k.add(b, y, y)  # pages are allocated when they are first written

    def work() -> None:
        k.each(one, len(pairs))

    k.each(own, len(pairs))
    work()
    moved = 3.0 * MEMORY_BYTES * len(pairs)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        best = max(best, moved / seconds_of(k, work))
    return best

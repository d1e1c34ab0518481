"""The peaks of a backend, measured through its vocabulary: matmuls, and moving memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from distgpt.gpu.api import TYPE_OF
from distgpt.kernels.api import Affine, Array, Kernels
from distgpt.kernels.cpu import CpuKernels

SIDES = (512, 1024, 2048, 4096, 8192)  # of square matmuls, as far as the time suffices
SECONDS, OF_MATMULS = 2.4, 2 / 3  # of measuring, and the part of it for matmuls
SHORTEST = 0.01  # seconds of a measurement: enough calls to fill a queue
MEMORY_BYTES = 64 << 20  # of each array of a worker: more than caches hold
REPEATS = 4


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of all workers of one rank together, while the other ranks did the same."""

    gflops: float
    gbytes_per_s: float
    dtype: str

    def or_higher(self, other: Peaks) -> Peaks:
        """The higher of each, of two measurements of which either may have been disturbed."""
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
    matmuls = _matmuls(kernels, limit * OF_MATMULS)
    meet()
    return Peaks(matmuls / 1e9, _memory(kernels, limit * (1 - OF_MATMULS)) / 1e9, dtype)


def _matmuls(k: Kernels, seconds: float) -> float:
    """FLOP/s of the best size and direction."""
    best, end = 0.0, time.perf_counter() + seconds
    for side in SIDES:
        flops = 2.0 * side**3
        if best and time.perf_counter() + 3 * flops / best > end:
            break
        x, y = (k.zeros(side, side) for _ in range(2))
        _fill(k, x)
        dw = k.wide_zeros(side, side)
        works: tuple[Callable[[], None], ...] = (
            partial(k.linear, y, x, Affine(x, None)),
            partial(k.linear_backward, y, x, x),
            partial(k.linear_backward_weights, Affine(dw, None), x, x, False),
        )
        for _ in range(REPEATS):  # the first call of each may compile, or choose an algorithm
            best = max(best, *(flops / _seconds(k, work) for work in works))
            if time.perf_counter() > end:
                break
    return best


def _memory(k: Kernels, seconds: float) -> float:
    """Bytes per second of y ← y + b, each worker with arrays of its own.

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
        best = max(best, moved / _seconds(k, work))
    return best


def _seconds(k: Kernels, work: Callable[[], None]) -> float:
    """Seconds of one call, timed over as many as take at least SHORTEST."""
    calls, done = 1, k.scalars(1)
    while True:
        k.to_host(done)
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        k.to_host(done)  # waits
        taken = time.perf_counter() - begun
        if taken >= SHORTEST:
            return taken / calls
        calls = max(2 * calls, int(calls * 1.3 * SHORTEST / max(taken, 1e-6)))


def _fill(k: Kernels, array: Array) -> None:
    """Values with which matmuls neither overflow nor underflow."""
    some = np.random.default_rng(0).standard_normal(1 << 16, np.float32) / len(array)
    k.put(array, np.resize(some, array.shape))

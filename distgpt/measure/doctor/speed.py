"""Measure how fast a backend multiplies matrices and moves memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.ops.api import Affine, Array
from distgpt.core.ops.kernels import Kernels

SIDES = (512, 1024, 2048, 4096, 8192)  # of square matmuls, as far as the time suffices
SHORTEST = 0.01  # seconds of a measurement: enough calls to fill a queue
REPEATS = 4
SECONDS, OF_MATMULS = 2.4, 2 / 3  # of measuring, and the part of it for matmuls
MEMORY_BYTES = 64 << 20  # of each array of a worker: more than caches hold


def matmul_rate(k: Kernels, seconds: float) -> float:
    """FLOP/s of the best size and direction, measured for this long after everything is compiled."""
    best, end = 0.0, float("inf")
    for side in SIDES:
        flops = 2.0 * side**3
        if best and time.perf_counter() + 3 * flops / best > end:
            break
        works = _matmuls(k, side)
        if not best:
            for work in works:  # the first call of each may compile, or choose an algorithm
                work()
            end = time.perf_counter() + seconds
        for _ in range(REPEATS):
            best = max(best, *(flops / seconds_of(k, work) for work in works))
            if time.perf_counter() > end:
                break
    return best


def _matmuls(k: Kernels, side: int) -> tuple[Callable[[], None], ...]:
    """Make the matmuls of a linear layer: forward, and backward into its input and its weights."""
    x, y = (k.zeros(side, side) for _ in range(2))
    _fill(k, x)
    dw = k.wide_zeros(side, side)
    return (
        partial(k.linear, y, x, Affine(x, None)),
        partial(k.linear_backward, y, x, x),
        partial(k.linear_backward_weights, Affine(dw, None), x, x, False),
    )


def seconds_of(k: Kernels, work: Callable[[], None]) -> float:
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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of all workers of one rank together, measured while the other ranks did the same."""

    gflops: float
    gbytes_per_s: float
    dtype: str


def measure_peaks(
    kernels: Kernels, seconds: float | None = None, meet: Callable[[], None] = lambda: None
) -> Peaks:
    """Time matmuls and memory for about `seconds` (SECONDS if None), at least once each, after compiling.

    `meet` returns once all ranks have called it, so that all measure at the same time.
    """
    limit = SECONDS if seconds is None else seconds
    stored = np.dtype(kernels.dtype)
    dtype = "bfloat16" if stored == np.uint16 else stored.name  # its bits: NumPy has no type for it
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

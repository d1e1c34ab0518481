"""What a backend can do at most, measured through its vocabulary: matrix products, and moving memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from distgpt.gpu.dtypes import TYPE_OF
from distgpt.kernels.api import Affine, Array, Kernels

SIDES = (512, 1024, 2048, 4096, 8192)  # of square products, as long as the time lasts
SECONDS, OF_PRODUCTS = 2.4, 2 / 3  # of measuring, and which part of it goes to products
SHORTEST = 0.01  # seconds from which a measurement counts: a queue has to be filled
MEMORY_BYTES = 64 << 20  # of each array on a worker: more than caches hold
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

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


def measure_peaks(
    kernels: Kernels, seconds: float = SECONDS, meet: Callable[[], None] = lambda: None
) -> Peaks:
    """In about so many seconds, once everything is compiled: one try of each at least.

    `meet` returns once all ranks have called it: they then do the same at the same time.
    """
    dtype = TYPE_OF[np.dtype(kernels.dtype)]
    meet()
    products = _products(kernels, seconds * OF_PRODUCTS)
    meet()
    return Peaks(products / 1e9, _memory(kernels, seconds * (1 - OF_PRODUCTS)) / 1e9, dtype)


def _products(k: Kernels, seconds: float) -> float:
    """Operations per second of the best size and direction."""
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
        for _ in range(REPEATS):  # the first call of each may have to compile, or to choose among ways
            best = max(best, *(flops / _seconds(k, work) for work in works))
            if time.perf_counter() > end:
                break
    return best


def _memory(k: Kernels, seconds: float) -> float:
    """Bytes per second of y ← y + b, each worker with arrays of its own: what is written was read before."""
    count = MEMORY_BYTES // k.dtype.itemsize
    pairs = [(k.zeros(count), k.zeros(count)) for _ in range(k.threads)]

    def one(worker: int) -> None:
        y, b = pairs[worker]
        k.add(y, y, b)

    def own(worker: int) -> None:
        y, b = pairs[worker]
        k.add(b, y, y)  # memory that nobody wrote to may not be there yet

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
    """Of one call, from as many as take long enough."""
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
    """Numbers that products neither grow from nor underflow with."""
    some = np.random.default_rng(0).standard_normal(1 << 16, np.float32) / len(array)
    k.put(array, np.resize(some, array.shape))

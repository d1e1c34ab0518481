"""How many times as fast as float32 this processor multiplies bfloat16: by its kind, or measured once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256

import numpy as np

from distgpt.core.base.caches import made_by_one
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.compiling.processor import processor, shape
from distgpt.core.cpu.matmul import blas
from distgpt.core.cpu.matmul.layers import OwnMatmuls
from distgpt.core.cpu.pool import pool_of
from distgpt.core.ops.low_precision import BITS, to_bfloat16

# Rows, inputs and outputs of a layer of each class, by the width up to which a model belongs to it. Its three
# matmuls take 1.5 and 12 ms in float32 on a core of a Zen 4, so all turns 0.02 and 0.13 s.
SAMPLES = {255: (512, 128, 384), 1 << 30: (256, 512, 1536)}
TURNS = 6  # the shortest of them counts: on a busy machine most are longer


def gain(width: int) -> float:
    """Return the ratio for models of this width; 1 where tiles widen bfloat16 to float32: nothing is gained.

    One thread measures: matmuls are bound by arithmetic, which other cores do not slow down.
    """
    return _kept(next(most for most in SAMPLES if width <= most)) if shape().dot else 1.0


@cache
def _kept(most: int) -> float:
    """Return what was measured here once, whatever the number of threads: the next run computes alike.

    The folder is one for each version of the sources of our matmul, and of NumPy.
    """
    about = processor(), shape(), blas.blas_core_name(), SAMPLES[most]
    name = f"bfloat16-{sha256(repr(about).encode()).hexdigest()[:16]}.json"
    measure = partial(_measured, *SAMPLES[most])
    known, folder = disk_cache.read(name), disk_cache.folder()
    if known is None:  # one process measures undisturbed, the others read its result
        known = made_by_one(folder and folder / name, measure)
    return float(json.loads(known))


def _measured(rows: int, inputs: int, outputs: int) -> bytes:
    """Time the three matmuls of a layer in both types, in turns, after one that compiles.

    NumPy multiplies float32, which needs nothing compiled: own loops are at most 5 % faster. What is compiled
    for bfloat16 is what a run in it needs.
    """
    blas.single_threaded_blas()
    own = OwnMatmuls(pool_of(1), BITS)
    wide = [
        np.full(shape, 1e-3, np.float32) for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
    ]
    (x, dy, w), (low_x, low_dy, low_w) = wide, map(to_bfloat16, wide)
    y, dx, dw = (np.zeros_like(array) for array in (dy, x, w))
    low_y, low_dx = np.zeros_like(low_dy), np.zeros_like(low_x)

    def float32() -> None:
        np.matmul(x, w.T, out=y)
        np.matmul(dy, w, out=dx)
        np.matmul(dy.T, x, out=dw)

    def bfloat16() -> None:
        own.forward(low_y, low_x, low_w, None)
        own.backward(low_dx, low_dy, low_w)
        own.backward_weights(dw, low_dy, low_x, accumulate=False)

    ways: list[Callable[[], None]] = [float32, bfloat16]
    times: dict[Callable[[], None], list[float]] = {way: [] for way in ways}
    for _ in range(1 + TURNS):
        for way, taken in times.items():
            begun = time.perf_counter()
            way()
            taken.append(time.perf_counter() - begun)
    return json.dumps(min(times[float32][1:]) / min(times[bfloat16][1:])).encode()

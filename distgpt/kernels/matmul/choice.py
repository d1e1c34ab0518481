"""Choose between our own kernels and the BLAS for float32 matmuls: measured once on a machine, then kept.

The stored result decides for every process on the machine, whatever its number of threads, so that a run
resumed there computes the same bits.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.files import made_once
from distgpt.kernels.api import Array
from distgpt.kernels.fused import blas, disk_cache
from distgpt.kernels.matmul.blocked import in_the_way
from distgpt.kernels.matmul.layers import BlasMatmuls, Matmuls, OwnMatmuls
from distgpt.kernels.matmul.processor import processor
from distgpt.kernels.pool import Pool

FORWARD, BACKWARD, WEIGHTS = "forward", "into input", "into weights"
NARROW, WIDE, FEW, IN_THE_WAY = "narrow", "wide", "few rows", "rows of 4 KB"
LEAST_WIDE = 1 << 17  # elements of w from which on a layer counts as wide
MANY = 64  # rows from which on they are not few
# A layer of each class: rows, inputs, outputs.
SAMPLES = {
    NARROW: (512, 128, 384),
    WIDE: (512, 768, 2304),
    FEW: (16, 768, 2304),
    IN_THE_WAY: (512, 1024, 1024),
}
TIE = 0.97  # nearly as fast counts as faster, or chance would choose between equals
REPEATS, SECONDS = 4, 0.02  # of both together, at least

Speeds = dict[str, dict[str, float]]  # of each class: GFLOP/s of "own" and of "blas"


def matmuls(pool: Pool, dtype: Any, matmul: str) -> Matmuls:
    """Return the requested matmuls for a type: the BLAS where nothing can be kept, and for float64."""
    if dtype != np.float32 or matmul == "blas":
        return BlasMatmuls(pool)
    if matmul == "own":
        return OwnMatmuls(pool, dtype)
    speeds = _kept_speeds(pool)
    return Chosen(pool, speeds) if speeds else BlasMatmuls(pool)


class Chosen:
    """Compute each matmul by the faster one of its class."""

    def __init__(self, pool: Pool, speeds: Speeds) -> None:
        self.speeds = speeds
        blas, own = BlasMatmuls(pool), OwnMatmuls(pool, np.float32)
        self._by = {name: own if own_wins(of) else blas for name, of in speeds.items()}

    @property
    def words(self) -> str:
        slower, classes = sum(not own_wins(of) for of in self.speeds.values()), len(self.speeds)
        if slower in (0, classes):
            return BlasMatmuls.words if slower else OwnMatmuls.words
        return f"{OwnMatmuls.words} ({BlasMatmuls.words} in {slower} of {classes} size classes)"

    def forward(self, y: Array, x: Array, w: Array, bias: Array | None) -> None:
        self._by[class_of(FORWARD, x, w)].forward(y, x, w, bias)

    def backward(self, dx: Array, dy: Array, w: Array) -> None:
        self._by[class_of(BACKWARD, dy, w)].backward(dx, dy, w)

    def backward_weights(self, dw: Array, dy: Array, x: Array, accumulate: bool) -> None:
        self._by[class_of(WEIGHTS, dy, dw)].backward_weights(dw, dy, x, accumulate)


def class_of(form: str, a: Array, w: Array) -> str:
    """Return the class of a matmul; `a` has its rows."""
    kind = WIDE
    if w.size < LEAST_WIDE:
        kind = NARROW
    elif len(a) < MANY:
        kind = FEW
    elif form != WEIGHTS and in_the_way(a):  # there a kernel of ours copies them anyway
        kind = IN_THE_WAY
    return f"{form}, {kind}"


def own_wins(speeds: dict[str, float]) -> bool:
    return speeds["own"] >= TIE * speeds["blas"]


@cache
def _kept_speeds(pool: Pool) -> Speeds | None:
    """Return the speeds measured here once; None where nothing can be kept."""
    folder = disk_cache.folder()
    if folder is None:
        return None
    key = sha256(repr((processor(), blas.core_name(), np.__version__)).encode()).hexdigest()[:16]
    path = folder / f"matmul-{key}.json"
    with suppress(OSError, ValueError), _alone(folder / "matmul.lock"):
        speeds: Speeds = json.loads(made_once(path, partial(_measured, pool)))
        return speeds if path.exists() else None  # not on a full disk
    return None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process in after the other: the first measures undisturbed, the others read its result."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _measured(pool: Pool) -> bytes:
    """Time both on a layer of each class."""
    speeds = {}
    rivals: dict[str, Matmuls] = {"own": OwnMatmuls(pool, np.float32), "blas": BlasMatmuls(pool)}
    for rows, inputs, outputs in SAMPLES.values():
        shapes = (rows, inputs), (rows, outputs), (outputs, inputs)
        x, dy, w = (np.full(shape, 1e-3, np.float32) for shape in shapes)
        y, dx, dw = (np.zeros_like(array) for array in (dy, x, w))
        calls: dict[str, Callable[[Matmuls], None]] = {
            class_of(FORWARD, x, w): lambda m: m.forward(y, x, w, None),  # noqa: B023
            class_of(BACKWARD, dy, w): lambda m: m.backward(dx, dy, w),  # noqa: B023
            class_of(WEIGHTS, dy, dw): lambda m: m.backward_weights(dw, dy, x, False),  # noqa: B023
        }
        for name, call in calls.items():
            best = _seconds(call, rivals)
            speeds[name] = {rival: 2e-9 * rows * w.size / taken for rival, taken in best.items()}
    return json.dumps(speeds).encode()


def _seconds(call: Callable[[Matmuls], None], rivals: dict[str, Matmuls]) -> dict[str, float]:
    """Return the shortest of some calls of each, in turns, once they are compiled."""
    best = dict.fromkeys(rivals, float("inf"))
    for rival in rivals.values():
        call(rival)
    turns, end = 0, time.perf_counter() + SECONDS
    while turns < REPEATS or time.perf_counter() < end:
        turns += 1
        for name, rival in rivals.items():
            begun = time.perf_counter()
            call(rival)
            best[name] = min(best[name], time.perf_counter() - begun)
    return best

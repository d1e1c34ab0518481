"""The matmuls of linear layers, split over threads: by our own microkernels or the faster BLAS."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distgpt.files import made_once
from distgpt.kernels.api import Floats1d, Floats2d, Wide2d
from distgpt.kernels.fused import disk_cache, linear
from distgpt.kernels.low_precision import BITS, from_bfloat16
from distgpt.kernels.matmul import blocked, packing
from distgpt.kernels.matmul.blocked import rows_conflict
from distgpt.kernels.matmul.processor import processor
from distgpt.kernels.pool import COLUMNS, ROWS, Pool, WorkerMemory


class Matmuls(Protocol):
    """The three matmuls of a linear layer; `words` name for people what computes them."""

    @property
    def words(self) -> str: ...

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        """y ← x wᵀ + bias"""

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x"""


class BlasMatmuls:
    """Matmuls of float32 or float64. Splits the longer side: every worker packs the shorter one."""

    words = "BLAS"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        if len(x) < len(w):
            self._pool.ranges(len(w), COLUMNS, linear.linear_columns, y, x, w, bias)
        else:
            self._pool.ranges(len(x), ROWS, linear.linear, y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        self._pool.ranges(len(dx), ROWS, linear.linear_backward, dx, dy, w)

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        self._pool.ranges(dy.shape[1], COLUMNS, linear.linear_backward_weights, dw, dy, x, accumulate)


class OwnMatmuls:
    """Matmuls of float32, or of bfloat16 as uint16. Splits the longer side."""

    words = "own kernels"

    def __init__(self, pool: Pool, dtype: Any) -> None:
        self._pool, self._dtype = pool, np.dtype(dtype).name
        self._memory = WorkerMemory(pool)

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        if bias is not None and bias.dtype == BITS:
            bias = from_bfloat16(bias)
        self._cut(blocked.forward, len(x) < len(w), len(w), y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w"""
        width = w.shape[1]
        self._cut(blocked.backward, len(dx) < len(w) and self._share_panels(width), width, dx, dy, w)

    def _cut(
        self, loop: Callable[..., None], by_columns: bool, width: int, c: Floats2d, a: Floats2d, *of: Any
    ) -> None:
        """Let workers compute rows of C (…, width), or columns."""

        def part(first: int, last: int) -> None:
            rows, columns = ((0, len(a)), (first, last)) if by_columns else ((first, last), (0, width))
            count = _up(rows[1] - rows[0])
            own = self._memory.of(blocked.scratch, self._dtype, count, a.shape[1], rows_conflict(a))
            loop(*rows, *columns, c, a, *of, own)

        total, grain = (width, packing.COLUMNS) if by_columns else (len(a), packing.ROWS)
        self._pool.ranges(total, grain, part)

    def _share_panels(self, columns: int) -> bool:
        """Return whether threads that take panels get about the same: then nobody packs another's."""
        panels, threads = -(-columns // packing.COLUMNS), self._pool.threads
        return 8 * threads * -(-panels // threads) <= 9 * panels

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] dyᵀ x; each worker packs the shorter side, and its part of the longer one."""
        outputs, inputs = dw.shape
        if inputs <= packing.COLUMNS < outputs:
            self._turned_weights(dw, dy, x, accumulate)
            return
        by_rows, is_thin = outputs >= inputs, outputs <= packing.COLUMNS

        def part(first: int, last: int) -> None:
            top, bottom = (first, last) if by_rows else (0, outputs)
            begin, end = (0, inputs) if by_rows else (first, last)
            own = self._memory.of(blocked.product_scratch, self._dtype, len(x), end - begin, is_thin)
            blocked.products(top, bottom, begin, end, dw, dy, x, own, int(accumulate))

        grain = packing.ROWS if by_rows else packing.COLUMNS
        self._pool.ranges(max(outputs, inputs), grain, part)

    def _turned_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        """dw ← [dw +] (xᵀ dy)ᵀ: for few inputs, where packing dy as rows would take longer than the sums."""
        outputs, inputs = dw.shape

        def part(first: int, last: int) -> None:
            own = self._memory.of(blocked.product_scratch, self._dtype, len(x), last - first, True)
            sums = self._memory.of(np.empty, (inputs, outputs), "float32")
            blocked.products(0, inputs, first, last, sums, x, dy, own, 0)
            turned = sums[:, first:last].T
            dw[first:last] = dw[first:last] + turned if accumulate else turned

        self._pool.ranges(outputs, packing.COLUMNS, part)


def _up(rows: int) -> int:
    """Return the next power of two, so that prompts of many lengths share their scratch memory."""
    return 1 << (rows - 1).bit_length()


# -- the choice for float32: both are measured once on a machine. The stored result decides for every process
# there, whatever its number of threads, so that a run resumed there computes the same bits.

FORWARD, BACKWARD, WEIGHTS = "forward", "into input", "into weights"
NARROW, WIDE, FEW, CONFLICTING = "narrow", "wide", "few rows", "rows of 4 KB"
LEAST_WIDE = 1 << 17  # elements of w from which on a layer counts as wide
MANY = 64  # rows from which on they are not few
# A layer of each class: rows, inputs, outputs.
SAMPLES = {
    NARROW: (512, 128, 384),
    WIDE: (512, 768, 2304),
    FEW: (16, 768, 2304),
    CONFLICTING: (512, 1024, 1024),
}
TIE = 0.97  # nearly as fast counts as faster, or chance would choose between equals
REPEATS, SECONDS = 4, 0.02  # of both together, at least

Speeds = dict[str, dict[str, float]]  # of each class: GFLOP/s of "own" and of "blas"


def matmuls_for(pool: Pool, dtype: Any, matmul: str) -> Matmuls:
    """Return the requested matmuls for a type: the BLAS where nothing can be kept, and for float64."""
    if dtype != np.float32 or matmul == "blas":
        return BlasMatmuls(pool)
    if matmul == "own":
        return OwnMatmuls(pool, dtype)
    speeds = _stored_speeds(pool)
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

    def forward(self, y: Floats2d, x: Floats2d, w: Floats2d, bias: Floats1d | None) -> None:
        self._by[class_of(FORWARD, x, w)].forward(y, x, w, bias)

    def backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        self._by[class_of(BACKWARD, dy, w)].backward(dx, dy, w)

    def backward_weights(self, dw: Wide2d, dy: Floats2d, x: Floats2d, accumulate: bool) -> None:
        self._by[class_of(WEIGHTS, dy, dw)].backward_weights(dw, dy, x, accumulate)


def class_of(form: str, a: Floats2d, w: Floats2d) -> str:
    """Return the class of a matmul; `a` has its rows."""
    kind = WIDE
    if w.size < LEAST_WIDE:
        kind = NARROW
    elif len(a) < MANY:
        kind = FEW
    elif form != WEIGHTS and rows_conflict(a):  # there a kernel of ours copies them anyway
        kind = CONFLICTING
    return f"{form}, {kind}"


def own_wins(speeds: dict[str, float]) -> bool:
    return speeds["own"] >= TIE * speeds["blas"]


@cache
def _stored_speeds(pool: Pool) -> Speeds | None:
    """Return the speeds measured here once; None where nothing can be kept."""
    key = sha256(repr((processor(), linear.blas_core_name(), np.__version__)).encode()).hexdigest()[:16]
    name = f"matmul-{key}.json"
    if known := disk_cache.read(name):
        return dict(json.loads(known))
    if (folder := disk_cache.folder()) is None:
        return None
    with suppress(OSError, ValueError), _alone(folder / "matmul.lock"):
        speeds: Speeds = json.loads(made_once(folder / name, partial(_measured, pool)))
        return speeds if (folder / name).exists() else None  # not on a full disk
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
    backends: dict[str, Matmuls] = {"own": OwnMatmuls(pool, np.float32), "blas": BlasMatmuls(pool)}
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
            best = _seconds(call, backends)
            speeds[name] = {backend: 2e-9 * rows * w.size / taken for backend, taken in best.items()}
    return json.dumps(speeds).encode()


def _seconds(call: Callable[[Matmuls], None], backends: dict[str, Matmuls]) -> dict[str, float]:
    """Return the shortest of some calls of each, in turns, once they are compiled."""
    best = dict.fromkeys(backends, float("inf"))
    for backend in backends.values():
        call(backend)
    turns, end = 0, time.perf_counter() + SECONDS
    while turns < REPEATS or time.perf_counter() < end:
        turns += 1
        for name, backend in backends.items():
            begun = time.perf_counter()
            call(backend)
            best[name] = min(best[name], time.perf_counter() - begun)
    return best

"""Muon on a GPU: matmuls of a library, and kernels around them."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from distgpt.gpu.device import BLOCK, LARGEST_BLOCK, WARP
from distgpt.gpu.launcher import Launcher
from distgpt.gpu.linear import Linears
from distgpt.kernels.api import POLAR, Array, MuonMatrix

STEP = 4  # values of a step that all threads read, as in muon.cu


class MuonSteps:
    """Momentum, orthogonalised updates, and steps along them, matrix by matrix."""

    def __init__(self, launcher: Launcher, linears: Linears, storage: np.dtype, wide: np.dtype) -> None:
        self._launcher, self._linears = launcher, linears
        self._storage, self._wide = storage, wide

    def momentum(self, m: Array, g: Array, norm: Array, scalars: Array) -> None:
        self._each("muon_momentum", m.size, m, g, self._step(norm, scalars))

    def orthogonalise(self, u: Array, squares: Array) -> None:
        """See `Kernels.orthogonalise`; squares[0] is Σ u². Where there are more rows, xᵀ x is the square."""
        x, y = (self._launcher.scratch(name, u.shape, self._storage) for name in ("ortho", "ortho again"))
        side, stands = min(u.shape), u.shape[0] > u.shape[1]
        square, fourth = (
            self._launcher.scratch(name, (side, side), self._storage) for name in ("square", "fourth")
        )
        factor = self._launcher.scratch("shrinking", (1,), self._wide)
        self._launcher.start("muon", "shrinking", 1, WARP, factor, squares)
        self._each("normalise", u.size, x, u, factor)
        for a, b, c in POLAR:
            self._linears.product(square, x, x, transpose_a=stands, transpose_b=not stands)
            self._linears.product(fourth, square, square)
            count = square.size
            self._launcher.start(
                "muon", "polynomial", -(-count // BLOCK), BLOCK, square, fourth, a, b, c, side
            )
            self._linears.product(y, *((x, square) if stands else (square, x)))
            x, y = y, x
        self._each("widen_update", u.size, u, x)

    def step(self, matrices: Sequence[MuonMatrix], norm: Array, scalars: Array, beta2: float) -> None:
        step = self._step(norm, scalars)
        factor = self._launcher.scratch("length factor", (1,), self._wide)
        for p, low, v, u in matrices:
            rows, columns = p.shape
            by_rows = rows >= columns
            q = self._launcher.scratch("mean squares", v.shape, self._wide)
            if by_rows:
                self._launcher.start("muon", "rows_squared", rows, BLOCK, v, q, u, step, beta2, columns)
            else:
                blocks, sizes = -(-columns // BLOCK), (rows, columns)
                self._launcher.start("muon", "columns_squared", blocks, BLOCK, v, q, u, step, beta2, *sizes)
            self._launcher.start("muon", "length_factor", 1, LARGEST_BLOCK, factor, v, q, v.size)
            shape = sqrt(max(1, rows / columns))
            args = (p, low, u, v, factor, step, shape, int(by_rows), columns)
            self._each("muon_step", p.size, *args)

    def _step(self, norm: Array, scalars: Array) -> Array:
        step = self._launcher.scratch("muon step", (STEP,), self._wide)
        self._launcher.start("muon", "muon_scalars", 1, WARP, step, norm, scalars)
        return step

    def _each(self, kernel: str, count: int, *args: object) -> None:
        self._launcher.start("muon", kernel, -(-count // BLOCK), BLOCK, *args, count)

"""Muon on a GPU: strided batched matmuls of a library, and kernels for many matrices per launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from distgpt.core.ops.api import POLAR, Array, MuonMatrix
from distgpt.gpu.device import BLOCK, LARGEST_BLOCK, WARP, address
from distgpt.gpu.linear import LinearKernels
from distgpt.gpu.matmul import Matmul

STEP = 4  # values of a step that all threads read, as in muon.cu
PIECE = 4096  # elements per block, as in muon.cu
MOST_BYTES = 256 << 20  # scratch memory, enough for GPT-2 in bfloat16; one large matrix may need more
APART = 128  # elements; alignment of all parts of the scratch memory, for the widest loads


class MuonKernels(LinearKernels):
    """Momentum, orthogonalized updates, and steps along them. The number of launches is independent of
    layers.

    Matrices can be anywhere: a table on the device has their addresses. Only the matmuls need a constant
    stride. Their operands are scratch memory, which `normalise` fills.
    """

    _tables: dict[tuple[tuple[int, ...], ...], Array]

    def muon_momentum(self, m: Sequence[Array], g: Sequence[Array], norm: Array, scalars: Array) -> None:
        pairs = [pair for pair in zip(m, g, strict=True) if pair[0].size]
        if not pairs:
            return
        table = self._table([(*_places(pair, pairs[0]), pair[0].size) for pair in pairs])
        grid = _pieces(max(each.size for each, _ in pairs)), len(pairs)
        self._start_muon("muon_momentum", grid, BLOCK, *pairs[0], table, self._step(norm, scalars))

    def orthogonalise(self, updates: Sequence[Array]) -> None:
        """See `Kernels.orthogonalise`. Tall matrices are transposed in scratch memory."""
        room = self._room_for([u.shape for u in updates])
        memory = self.launcher.scratch("orthogonalise", (room,), self.dtype)
        for batch in self._batches(updates):
            self._orthogonalise(batch, memory)

    def _room_for(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the elements of scratch memory. More matrices never need less."""
        sides = [_sides(shape) for shape in shapes]
        return max((min(sides.count(each), self._most(each)) * _room(each) for each in sides), default=0)

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        return self._room_for(shapes) * int(self.dtype.itemsize)

    def muon(self, matrices: Sequence[MuonMatrix], norm: Array, scalars: Array, beta2: float) -> None:
        if not matrices:  # a rank without matrices
            return
        first, scratch = matrices[0], self.launcher.scratch
        longest = max(each.v.size for each in matrices)
        table = self._table(
            [(*_places(each, first), i * longest, *each.p.shape) for i, each in enumerate(matrices)]
        )
        q = scratch("mean squares", (len(matrices) * longest,), self.accum_dtype)
        factors = scratch("length factors", (len(matrices), 2), self.accum_dtype)
        step, many = self._step(norm, scalars), len(matrices)
        blocks = -(-longest // WARP)
        args = (first.v, q, first.u, table, step, beta2)
        self._start_muon("mean_squares", (blocks, many), WARP * WARP, *args)
        self._start_muon("length_factor", (1, many), LARGEST_BLOCK, factors, first.v, q, table)
        grid = _pieces(max(each.p.size for each in matrices)), many
        self._start_muon("muon_step", grid, BLOCK, first.p, first.low, first.v, first.u, table, factors, step)

    def _batches(self, updates: Sequence[Array]) -> Iterator[list[Array]]:
        """Divide matrices with equal sides, transposed or not, into batches that fit in memory."""
        alike: dict[tuple[int, int], list[Array]] = {}
        for u in updates:
            alike.setdefault(_sides(u.shape), []).append(u)
        for sides, some in alike.items():
            most = self._most(sides)
            yield from (some[start : start + most] for start in range(0, len(some), most))

    def _most(self, sides: tuple[int, int]) -> int:
        return max(1, MOST_BYTES // (_room(sides) * self.dtype.itemsize))

    def _orthogonalise(self, batch: list[Array], memory: Array) -> None:
        """Compute x ← a x + (b s + c s s) x, where s = x xᵀ, by three matmuls with fused addition."""
        (low, high), many = _sides(batch[0].shape), len(batch)
        size = low * high
        ends = [0, *(many * each for each in (_apart(size), 2 * _apart(size), _room((low, high))))]
        x, y, polynomial = (memory[a:b] for a, b in pairwise(ends))
        table = self._table([(*_places([u], batch[:1]), int(u.shape[0] > low)) for u in batch])
        factor = self.launcher.scratch("shrinking", (many,), self.accum_dtype)
        pieces = self.launcher.scratch("squares of updates", (many, _pieces(size)), np.dtype(np.float64))
        self._start_muon("update_squares", (_pieces(size), many), BLOCK, pieces, batch[0], table, size)
        self._start_muon("shrinking", many, BLOCK, factor, pieces, _pieces(size))
        tiles = -(-low // WARP) * -(-high // WARP), many
        self._start_muon("normalise", tiles, BLOCK, x, batch[0], table, factor, low, high)
        types = self._type, self._type
        gram = Matmul(low, low, high, False, True, *types, batch=many)
        square = Matmul(low, low, low, False, False, *types, onto=True, batch=many)
        along = Matmul(low, high, low, False, False, *types, onto=True, batch=many)
        for a, b, c in POLAR:
            s = y  # y has been read, and is not written before s is read
            self.matmuls.run(gram, s, x, x)
            self.matmuls.run(square, polynomial, s, s, onto=s, factors=(c, b))
            self.matmuls.run(along, y, polynomial, x, onto=x, factors=(1.0, a))
            x, y = y, x
        self._start_muon("widen_update", tiles, BLOCK, batch[0], x, table, low, high)

    def _step(self, norm: Array, scalars: Array) -> Array:
        step = self.launcher.scratch("muon step", (STEP,), self.accum_dtype)
        self._start_muon("muon_scalars", 1, WARP, step, norm, scalars)
        return step

    def _table(self, rows: Sequence[tuple[int, ...]]) -> Array:
        """Return these numbers on the device. They are uploaded at first use, never while recording."""
        key = tuple(rows)
        if key not in self._tables:
            self._tables[key] = self.integers(np.array(rows, np.int64), "int64")
        return self._tables[key]

    def _start_muon(self, kernel: str, grid: int | tuple[int, ...], block: int, *args: object) -> None:
        self.launcher.start("muon", kernel, grid, block, *args)


def _places(arrays: Sequence[Array | None], first: Sequence[Array | None]) -> list[int]:
    """Return the offset in elements of each array from the first array of the same type."""
    return [
        0 if x is None or start is None else (address(x) - address(start)) // x.itemsize
        for x, start in zip(arrays, first, strict=True)
    ]


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return min(shape), max(shape)


def _pieces(count: int) -> int:
    return -(-count // PIECE)


def _apart(elements: int) -> int:
    return -(-elements // APART) * APART


def _room(sides: tuple[int, int]) -> int:
    """Return a matrix's elements of scratch memory: x, y and one square matrix. The other square is in y."""
    low, high = sides
    return 2 * _apart(low * high) + _apart(low * low)

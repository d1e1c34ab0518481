"""The vocabulary on CPU cores with weights in int8 or int4: their matmuls quantise activations too.

Forward passes only. A matrix is a `Packed`; other parameters are arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distgpt.kernels.api import Affine, Array
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.decoding import factors
from distgpt.kernels.pool import ROWS


class Packed(NamedTuple):
    """A matrix (rows, k) for the int8 microkernels, in parts one after the other; `rows` of each."""

    parts: tuple[Array, ...]
    rows: tuple[int, ...]
    k: int

    def __len__(self) -> int:
        return sum(self.rows)


class Int8Kernels(CpuKernels):
    """CpuKernels that multiply by matrices in int8. `rounded`: int4, where those of layers are in int4."""

    def __init__(self, threads: int = 1, rounded: str = "int8") -> None:
        super().__init__("float32", threads)
        self.rounded = rounded

    def to_host(self, array: Any) -> Any:
        return restored(array) if isinstance(array, Packed) else array

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        w, b = wb
        if not isinstance(w, Packed):
            super().linear(y, x, wb, onto)
            return
        count = 1 << (len(x) - 1).bit_length()  # so that batches of many sizes share their memory
        a = self._memory.of(factors.factor_rows, count, w.k, w.parts[0].dtype.name)
        self._pool.ranges(len(x), ROWS, factors.quantise_rows, a, x)
        column = 0
        for panels, rows in zip(w.parts, w.rows, strict=True):
            out, bias = y[:, column : column + rows], None if b is None else b[column : column + rows]
            self._pool.ranges(rows, factors.UNIT, factors.multiply_columns, out, a, panels, bias, w.k)
            column += rows
        if onto is not None:
            self.add(y, y, onto)

    def embed(
        self,
        x: Array,
        tokens: Array,
        wte: Any,
        wpe: Array | None,
        seq_len: int,
        start: Array | None,
        positions: Array | None = None,
    ) -> None:
        if isinstance(wte, Packed):
            wte, tokens = self._rows(wte, tokens), np.arange(len(tokens))
        super().embed(x, tokens, wte, wpe, seq_len, start, positions)

    def add_embedding(self, x: Array, tokens: Array, w: Any) -> None:
        super().add_embedding(x, np.arange(len(tokens)), self._rows(w, tokens))

    def _rows(self, w: Packed, tokens: Array) -> Array:
        """Return a matrix's rows for these tokens."""
        rows = np.empty((len(tokens), w.k), np.float32)
        self._pool.ranges(len(tokens), ROWS, factors.unpack_rows, rows, w.parts[0], tokens)
        return rows

    def _unpadded(self, w: Any, vocab: int) -> Any:
        """Return a packed one as it is: only as many columns are computed as the scores have."""
        return w if isinstance(w, Packed) else super()._unpadded(w, vocab)


def restored(w: Packed) -> Array:
    """Return the float32 matrix."""
    out, first = np.empty((len(w), w.k), np.float32), 0
    for panels, rows in zip(w.parts, w.rows, strict=True):
        factors.unpack_rows(0, rows, out[first : first + rows], panels, np.arange(rows))
        first += rows
    return out

"""CPU kernels for int8 and int4 weights. Matmuls also quantize the activations.

Forward passes only. Quantized matrices are `Packed`, other parameters are arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.pool import ROWS
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.loops.operands import UNIT
from distgpt.inference.quantized import operands


class Packed(NamedTuple):
    """A matrix (rows, k) for the int8 microkernels, in consecutive parts; `rows` of each part."""

    parts: tuple[Array, ...]
    rows: tuple[int, ...]
    k: int

    def __len__(self) -> int:
        return sum(self.rows)


class Int8Kernels(CpuKernels):
    """CpuKernels that also multiply by quantized matrices. `rounded`: the type of the layers' weights."""

    def __init__(self, threads: int = 1, rounded: str = "int8") -> None:
        super().__init__("float32", threads)
        self.rounded = rounded
        self.capabilities = replace(self.capabilities, rounded=rounded)

    def _matmul(self, y: Array, x: Array, w: Array | Packed, b: Array | None) -> None:
        if not isinstance(w, Packed):
            return super()._matmul(y, x, w, b)
        count = 1 << (len(x) - 1).bit_length()  # Batches of similar sizes share scratch memory.
        a = self._memory.scratch(operands.operand_rows, count, w.k, w.parts[0].dtype.name)
        self._pool.split_range(len(x), ROWS, operands.quantise_rows, a, x)
        column = 0
        for panels, rows in zip(w.parts, w.rows, strict=True):
            out, bias = y[:, column : column + rows], None if b is None else b[column : column + rows]
            self._pool.split_range(rows, UNIT, operands.multiply_columns, out, a, panels, bias, w.k)
            column += rows
        return None

    def _lookup(self, w: Array | Packed, tokens: Array) -> tuple[Array, Array]:
        if not isinstance(w, Packed):
            return w, tokens
        rows = np.empty((len(tokens), w.k), np.float32)
        self._pool.split_range(len(tokens), ROWS, operands.unpack_rows, rows, w.parts[0], tokens)
        return rows, np.arange(len(tokens))

    def _unpadded(self, w: Array | Packed, vocab: int) -> Array | Packed:
        """Packed matrices need no slice, as only the columns of the logits are computed."""
        return w if isinstance(w, Packed) else w[:vocab]

    def to_host(self, array: Array | Packed) -> Array:
        """Return a packed matrix as float32."""
        if not isinstance(array, Packed):
            return array
        out, first = np.empty((len(array), array.k), np.float32), 0
        for panels, rows in zip(array.parts, array.rows, strict=True):
            operands.unpack_rows(0, rows, out[first : first + rows], panels, np.arange(rows))
            first += rows
        return out

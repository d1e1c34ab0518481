"""Frozen matrices in int8 or int4 below LoRA adapters (QLoRA, arXiv 2305.14314), and embeddings in int8.

A `Held` matrix has a scale per 32 columns of a row. With int8, q are the integers; with int4, they are
indices of 16 levels, 16 bytes per 32 columns: the first 16 in the lower halves. So it holds distgpt's formats
(int8's blocks of 64 columns have two equal scales), and GGUF's Q8_0 and Q4_0, without rounding again. A
layer's matrix is expanded as its adapter is added, in memory that all layers share. The output layer is
expanded some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.fused import rowwise
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels, flattened
from distgpt.core.cpu.pool import ROWS
from distgpt.core.model.memory import Spec
from distgpt.core.ops.api import PIECE, Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.ops.low_precision import BITS, BLOCKS, from_bfloat16, nibbles
from distgpt.core.saved.tensors import Header, read_rows
from distgpt.inference.quantized.expand import BLOCK, add_to_bytes, add_to_nibbles, rows_of_bytes
from distgpt.inference.quantized.integers import LEVELS, PLACES
from distgpt.models.quantized.bits import bits_of
from distgpt.models.quantized.rounded import read_parameter

OURS, OF_GGUF = np.array(LEVELS, np.float32), np.arange(-8, 8, dtype=np.float32)
_EVERY = np.arange(1 << 16, dtype=np.uint16)
STEPS = from_bfloat16(_EVERY), _EVERY.view(np.float16).astype(np.float32)  # the scales, by their bits
STRIP = 4096  # rows read at a time
EXPANDED = 16 << 20  # bytes of the output layer expanded at a time


@dataclass(frozen=True, slots=True)
class Held:
    """A matrix, or some of its rows. `levels` is None for int8."""

    q: Array  # (rows, blocks · 32) int8 or (rows, blocks · 16) uint8
    scales: Array  # (rows, blocks), the bits of numbers in STEPS[is_half[0]]
    is_half: Array
    levels: Array | None
    columns: int

    def __len__(self) -> int:
        return len(self.q)

    @property
    def size(self) -> int:
        return len(self.q) * self.columns

    def __getitem__(self, rows: slice) -> Held:
        return Held(self.q[rows], self.scales[rows], self.is_half, self.levels, self.columns)

    @property
    def scaled(self) -> tuple[Array, ...]:
        return self.q, self.scales, STEPS[self.is_half[0]]

    @property
    def addition(self) -> tuple[Loop, tuple[Array, ...]]:
        """The loop that adds a product to this matrix, and its arrays (`CpuKernels.add_low_rank`)."""
        if self.levels is None:
            return add_to_bytes, self.scaled
        return add_to_nibbles, (*self.scaled, self.levels)

    def set(self, q: Array, scales: Array, levels: Array | None) -> None:
        """Fill this matrix from integers (rows, columns), or indices of these levels, and bfloat16 scales."""
        each = -(-self.scales.shape[1] // scales.shape[1])  # 2 if blocks have 64 columns
        self.scales[...] = np.repeat(scales, each, axis=1)[:, : self.scales.shape[1]]
        if self.levels is None or levels is None:
            self.q[:, : self.columns] = q
            return
        padded = np.zeros((len(q), self.scales.shape[1] * BLOCK), np.uint8)
        padded[:, : self.columns] = q
        halves = padded.reshape(len(q), -1, 2, BLOCK // 2)
        self.q[...] = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(self.q.shape)
        self.levels[...] = levels

    def read(self, path: Path, header: Header, spec: Spec, threads: int) -> None:
        """Read a matrix, exactly if these bits can hold its blocks, otherwise rounded if needed."""
        bits, kind = 8 if self.levels is None else 4, header.tensors[spec.name].dtype
        if kind not in BLOCKS or (kind == "Q8_0" and bits == 4):
            x = read_parameter(path, header, spec, bits, threads)
            self.set(x.q if bits == 8 else PLACES[x.q.view(np.uint8)], x.scales, None if bits == 8 else OURS)
            return
        self.is_half[0] = 1
        if self.levels is not None:
            self.levels[...] = OF_GGUF
        for first in range(0, len(self), STRIP):
            part = self[first : first + STRIP]
            blocks = np.empty(part.scales.shape, BLOCKS[kind])
            read_rows(path, header, spec.name, blocks, first)
            if not np.isfinite(blocks["d"]).all():
                raise DataError(f"{path} has weights that are not finite")
            part.scales[...] = blocks["d"].view(BITS)
            q = nibbles(blocks["q"]) if bits == 8 and kind == "Q4_0" else blocks["q"]
            part.q[...] = q.reshape(part.q.shape)

    def broadcast(self, comm: Comm) -> None:
        for array in (self.q, self.scales, self.is_half, self.levels):
            if array is not None:
                comm.broadcast(array)


def held_matrices(specs: Sequence[Spec], base: str, kernels: Kernels) -> dict[str, Held]:
    """Allocate these matrices by name. Their rows are padded with zeros to whole blocks."""
    result = {}
    for spec in specs:
        rows, blocks, is_int8 = spec.shape[0], -(-spec.shape[1] // BLOCK), bits_of(spec, base) == 8

        def new(columns: int, dtype: str, rows: int = rows) -> Array:
            if isinstance(kernels, CpuKernels):  # takes memory as it is written
                return np.zeros((rows, columns), dtype)
            return kernels.integers(np.broadcast_to(np.uint8(0), (rows, columns)), dtype)

        q = new(blocks * BLOCK, "int8") if is_int8 else new(blocks * BLOCK // 2, "uint8")
        levels = None if is_int8 else np.zeros(16, np.float32)
        is_half = np.zeros(1, np.uint8)
        result[spec.name] = Held(q, new(blocks, "uint16"), is_half, levels, spec.shape[1])
    return result


def load_held(comm: Comm, path: Path, header: Header, spec: Spec, held: Held, threads: int) -> None:
    """Read a matrix on rank 0 and broadcast it. Collective."""
    on_root(comm, lambda: held.read(path, header, spec, threads))
    held.broadcast(comm)


class HeldKernels(CpuKernels):
    """CpuKernels that also accept embeddings and an output layer in int8."""

    def _lookup(self, w: Array | Held, tokens: Array) -> tuple[Array, Array]:
        if not isinstance(w, Held):
            return super()._lookup(w, tokens)
        rows = self._memory.scratch(np.zeros, (len(tokens), w.columns), self.dtype.name)
        self._pool.split_range(len(tokens), ROWS, rows_of_bytes, rows, *w.scaled, tokens)
        return rows, self._memory.scratch(np.arange, len(tokens))

    def _expanded(self, w: Held) -> Iterator[tuple[slice, Array]]:
        """Yield slices of rows, and these rows, in memory that the next ones overwrite."""
        step = min(len(w), max(1, EXPANDED // (w.columns * self.dtype.itemsize)))
        memory = self._memory.scratch(np.zeros, (step, w.columns), self.dtype.name)
        every = self._memory.scratch(np.arange, len(w))
        for first in range(0, len(w), step):
            rows = slice(first, min(first + step, len(w)))
            piece = memory[: rows.stop - first]
            self._pool.split_range(len(piece), ROWS, rows_of_bytes, piece, *w.scaled, every[rows])
            yield rows, piece

    def _matmul(self, y: Array, x: Array, w: Array | Held, b: Array | None) -> None:
        if not isinstance(w, Held):
            return super()._matmul(y, x, w, b)
        for rows, piece in self._expanded(w):
            super()._matmul(y[:, rows], x, piece, None if b is None else b[rows])
        return None

    def linear_backward(self, dx: Array, dy: Array, w: Array | Held) -> None:
        """Sum the products with parts of the output layer in the wide type."""
        if not isinstance(w, Held):
            return super().linear_backward(dx, dy, w)
        count = 1 << (len(dy) - 1).bit_length()  # batches of similar sizes share scratch memory
        memory = self._memory.scratch(np.zeros, (2, count, w.columns), self.accum_dtype.name)
        total, part = memory[:, : len(dy)]
        for rows, piece in self._expanded(w):
            self.matmuls.backward(part if rows.start else total, dy[:, rows], piece)
            if rows.start:
                self.add(total, total, part)
        self._pool.split_range(dx.size, PIECE, rowwise.rounded, flattened(dx), flattened(total))
        return None


class HeldBfloat16Kernels(HeldKernels, Bfloat16Kernels):
    """The same, in bfloat16."""


def with_held(kernels: Kernels) -> Kernels:
    """Return kernels like these, with the same threads and memory, that accept `Held` embeddings."""
    if not isinstance(kernels, CpuKernels):  # a dry run's
        return kernels
    kind = HeldBfloat16Kernels if isinstance(kernels, Bfloat16Kernels) else HeldKernels
    result = kind.__new__(kind)
    vars(result).update(vars(kernels))
    return result

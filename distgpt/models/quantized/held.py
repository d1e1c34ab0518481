"""Frozen matrices in int8 or int4 below LoRA adapters (QLoRA, arXiv 2305.14314).

A `Held` matrix has a float32 scale per 32 columns of a row. With int8, q are the integers; with int4, they
are indices of 16 levels, 16 bytes per 32 columns: the first 16 in the lower halves. So it holds distgpt's
formats (int8's blocks of 64 columns have two equal scales), and GGUF's Q8_0 and Q4_0, without rounding again.
A layer's matrix is expanded as its adapter is added, in memory that all layers share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.model.memory import Spec
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.core.saved.tensors import Header
from distgpt.inference.quantized.expand import BLOCK, add_to_bytes, add_to_nibbles
from distgpt.inference.quantized.integers import LEVELS, PLACES, Quantised
from distgpt.models.formats.gguf.container import NUMBERS, TYPES, quantised, restored
from distgpt.models.quantized.rounded import read_parameter

OURS, OF_GGUF = np.array(LEVELS, np.float32), np.arange(-8, 8, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Held:
    """A matrix, or some of its rows. `levels` is None for int8."""

    q: Array  # (rows, blocks · 32) int8 or (rows, blocks · 16) uint8
    scales: Array  # (rows, blocks)
    levels: Array | None

    def __getitem__(self, rows: slice) -> Held:
        return Held(self.q[rows], self.scales[rows], self.levels)

    @property
    def addition(self) -> tuple[Loop, tuple[Array, ...]]:
        """The loop that adds a product to this matrix, and its arrays (`CpuKernels.add_low_rank`)."""
        if self.levels is None:
            return add_to_bytes, (self.q, self.scales)
        return add_to_nibbles, (self.q, self.scales, self.levels)

    def set(self, q: Array, scales: Array, levels: Array | None) -> None:
        """Fill this matrix from integers (rows, columns), or indices of these levels."""
        columns = q.shape[1]
        each = -(-self.scales.shape[1] // scales.shape[1])  # 2 if blocks have 64 columns
        self.scales[...] = np.repeat(scales, each, axis=1)[:, : self.scales.shape[1]]
        if self.levels is None or levels is None:
            self.q[:, :columns] = q
            return
        padded = np.zeros((len(q), self.scales.shape[1] * BLOCK), np.uint8)
        padded[:, :columns] = q
        halves = padded.reshape(len(q), -1, 2, BLOCK // 2)
        self.q[...] = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(self.q.shape)
        self.levels[...] = levels

    def read(self, path: Path, header: Header, spec: Spec, threads: int) -> None:
        """Read a matrix, exactly if it is from a file in Q8_0 or Q4_0, otherwise rounded if needed."""
        bits = 8 if self.levels is None else 4
        if not self._set_exactly(read_parameter(path, header, spec, 0), bits):
            x = read_parameter(path, header, spec, bits, threads)
            q = x.q if bits == 8 else PLACES[x.q.view(np.uint8)]
            self.set(q, from_bfloat16(x.scales), None if bits == 8 else OURS)

    def _set_exactly(self, w: Any, bits: int) -> bool:
        """Fill this matrix if GGUF's format of these bits represents w exactly."""
        if isinstance(w, Quantised) or w.shape[1] % BLOCK:
            return False
        kind = TYPES[NUMBERS["Q8_0" if bits == 8 else "Q4_0"]]
        with np.errstate(over="ignore"):
            blocks = quantised(kind, w)
        if not np.array_equal(restored(kind, blocks), w.reshape(-1)):
            return False
        q, scales = blocks["q"], blocks["d"].astype(np.float32).reshape(len(w), -1)
        if bits == 4:
            q = np.concatenate([q & 15, q >> 4], axis=1)
        self.set(q.reshape(w.shape), scales, None if bits == 8 else OF_GGUF)
        return True

    def broadcast(self, comm: Comm) -> None:
        for array in (self.q, self.scales, self.levels):
            if array is not None:
                comm.broadcast(array)


def held_matrices(specs: Sequence[Spec], base: str, kernels: Kernels) -> dict[str, Held]:
    """Allocate these matrices by name. Their rows are padded with zeros to whole blocks."""
    result = {}
    for spec in specs:
        rows, blocks = spec.shape[0], -(-spec.shape[1] // BLOCK)
        whole, dtype = (BLOCK, "int8") if base == "int8" else (BLOCK // 2, "uint8")

        def new(columns: int, dtype: str, rows: int = rows) -> Array:
            return kernels.integers(np.broadcast_to(np.uint8(0), (rows, columns)), dtype)

        levels = None if base == "int8" else np.zeros(16, np.float32)
        result[spec.name] = Held(new(blocks * whole, dtype), new(blocks, "float32"), levels)
    return result


def load_held(comm: Comm, path: Path, header: Header, spec: Spec, held: Held, threads: int) -> None:
    """Read a matrix on rank 0 and broadcast it. Collective."""
    on_root(comm, lambda: held.read(path, header, spec, threads))
    held.broadcast(comm)

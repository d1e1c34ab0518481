"""Linear layers whose matmuls read float8: half the bytes, and twice the rate of bfloat16 on tensor cores.

y = x wᵀ reads both in E4M3, which has 4 significant bits; dx = dy w reads dy in E5M2, which has 3 and a wider
range. A tensor is scaled by a power of two that brings its largest element near the largest number. Gradients
of weights, the gradient of the logits and everything between layers stay in bfloat16, as without it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from distgpt.core.ops.api import Array
from distgpt.gpu.api import Matmul, address
from distgpt.gpu.cublaslt import LtError
from distgpt.gpu.device import BLOCK
from distgpt.gpu.linear import Linears

MULTIPLE = 16  # of every size, which cuBLASLt asks for, and of addresses
TILE = 64  # rows and columns that a block turns, as in float8.cu
BLOCKS_EACH = 4  # that look for a tensor's largest element, on each multiprocessor
PIECE, NARROW_PIECE = 8, 16  # elements of 16 bytes, in bfloat16 and in float8


def room_for(elements: int) -> int:
    """Return the bytes that are kept for a tensor in float8: tensors of several shapes share them."""
    return 1 << (elements - 1).bit_length()


class Float8Linears(Linears):
    """Linear layers in bfloat16, with float8 where that is faster: rounding a tensor takes time, too."""

    _is_precise = False
    copy_bytes = staticmethod(room_for)

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Without float8: a loss by which runs are compared shall not depend on --float8."""
        before, self._is_precise = self._is_precise, True
        try:
            yield
        finally:
            self._is_precise = before

    def _way(self, fused: Matmul) -> Hashable:
        # Steps in float8 may win where those in bfloat16 do not: each has a choice of its own, also on disk.
        return fused if self._is_precise else (fused, "float8")

    def matmul(
        self,
        out: Array,
        a: Array,
        b: Array,
        transpose_b: bool = False,
        bias: Array | None = None,
        onto: Array | None = None,
    ) -> None:
        plain = super().matmul
        in_type = "e4m3" if transpose_b else "e5m2"
        kind = replace(self._kind(out, a, b, transpose_b=True), in_type=in_type, onto=onto is not None)
        kind = kind if bias is None else replace(kind, epilogue="bias")

        def wide() -> None:
            plain(out, a, b, transpose_b, bias, onto)

        def narrow() -> None:
            scales = self._launcher.scratch("float8 scales", (2,), self._wide)
            factors = (
                self._rounded("a", a, in_type, scales[:1]),
                self._rounded("b", b, "e4m3" if transpose_b else "turned", scales[1:]),
            )
            self.matmuls.run(kind, out, *factors, bias=bias, onto=onto, scales=scales)

        arrays = (each for each in (out, a, b, bias, onto) if each is not None)
        if self._is_precise or not self._fits(kind, *arrays):
            wide()
            return
        try:
            self._device.fastest(kind, (narrow, wide))
        except LtError:  # it was offered, but cannot be started
            self._possible[kind] = False
            wide()

    def _fits(self, kind: Matmul, *arrays: Array) -> bool:
        numbers = (kind.m, kind.n, kind.k, *map(address, arrays))
        return not kind.stride and not any(each % MULTIPLE for each in numbers) and self._can(kind)

    def _rounded(self, name: str, x: Array, how: str, scale: Array) -> Array:
        """Return x in "e4m3", "e5m2", or "turned" and in E4M3; scale ← what its elements stand for."""
        launcher, blocks = self._launcher, BLOCKS_EACH * self._device.multiprocessors
        pieces = x.size // PIECE
        parts = launcher.scratch("greatest", (min(blocks, -(-pieces // BLOCK)),), np.dtype(np.int32))
        launcher.start("float8", "greatest", parts.size, BLOCK, parts, x, pieces)
        rows, columns = x.shape
        is_turned = how == "turned"
        shape = (columns, rows) if is_turned else (rows, columns)
        room = launcher.scratch(f"float8 {name}", (room_for(x.size),), np.dtype(np.uint8))
        out = room[: x.size].reshape(shape)
        args = (out, scale, x, parts, parts.size)
        if is_turned:
            tiles = (-(-columns // TILE), -(-rows // TILE))
            launcher.start("float8", "narrow_turned", tiles, 4 * TILE, *args, rows, columns)
        else:
            pieces //= NARROW_PIECE // PIECE
            launcher.start("float8", f"narrow_{how}", min(blocks, -(-pieces // BLOCK)), BLOCK, *args, pieces)
        return out

"""Linear layers on a GPU: library matmuls, with fused operations if the library supports them.

If there is a fused and an unfused implementation, `device.fastest` selects one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import Affine, Array, Bias, BiasGradient, Work
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.device import LARGEST_BLOCK, TYPE_OF, WARP, CupyDevice, Launcher
from distgpt.gpu.matmul import LtMatmul, Matmul

FEW = 4  # maximum rows for which a linear layer is bound by reading w
SLICE = 64  # minimum rows per block of a column sum
DOWN = 8  # rows that a block reads together, as in common.cuh


class LinearKernels(Kernels):
    """Linear layers for arrays of the storage type. Gradients of parameters use the wide type."""

    launcher: Launcher
    device: CupyDevice
    _type: str
    _possible: dict[Matmul, bool]  # kinds of matmul that the library supports
    matmuls: LtMatmul

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        self._linear(y, x, wb, onto)  # a profile separates these calls from other operations' calls

    def _linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        (n, c), (w, b) = x.shape, wb
        if n > FEW:
            self._matmul(y, x, w, transpose_b=True, bias=b, onto=onto)
        else:
            kernel, _ = self.launcher.variant("linear_few_rows", c, x, w)
            warps = 8
            args = (y, onto, x, w, b, n, len(w), c)
            self.launcher.start("matmul", kernel, -(-len(w) // warps), warps * WARP, *args)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        self._matmul(dx, dy, w)

    def linear_backward_weights(
        self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Array | None = None
    ) -> None:
        self._weights(dwb, dy, x, accumulate, sums)

    def _weights(self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Array | None = None) -> None:
        """Compute dw ← dyᵀ x and db ← Σ dy, from partial sums if norm_backward left some."""
        dw, db = dwb
        plain = replace(self._kind(dw, dy, x, transpose_a=True), accumulate=accumulate)
        if db is None or sums is not None:
            self.matmuls.run(plain, dw, dy, x)
            if db is not None:
                assert sums is not None
                c = dy.shape[1]
                sum_parts(self.launcher, db, sums, slice(2 * c, 3 * c), accumulate)
            return

        fused = replace(plain, epilogue="column_sums")

        def apart() -> None:
            self.matmuls.run(plain, dw, dy, x)
            self._bias(BiasGradient(db, accumulate), dy)

        self._fastest(fused, not accumulate, lambda: self.matmuls.run(fused, dw, dy, x, bias=db), apart)

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        w, b = wb

        def apart() -> None:
            self._linear(pre, x, wb)
            self.launcher.each("elementwise", act, y.shape[1], y.size, y, pre, *_sizes(y, act))

        fused = replace(self._kind(y, x, w, transpose_b=True), epilogue="gelu", has_bias=b is not None)
        # cuBLASLt's gelu uses constants with ten digits.
        allowed = act == "gelu" and self._type != "float64" and len(x) > FEW
        self._fastest(fused, allowed, lambda: self.matmuls.run(fused, y, x, w, bias=b, aux=pre), apart)

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """Compute dpre. The unfused activation kernel also sums the columns that it writes."""
        parts = None if db is None else self._parts(dpre)

        def apart() -> None:
            self._matmul(y, dy, w)
            if parts is not None and not ACTIVATIONS[act].gated:
                self._slices("elementwise", f"{act}_backward_sums", parts, dpre, y, pre, int(again))
                return
            args = (dpre, y, pre, *_sizes(y, act), int(again))
            self.launcher.each("elementwise", f"{act}_backward", y.shape[1], y.size, *args)
            sums()

        def sums() -> None:
            if parts is not None:
                self._slices("reduce", "sum_slices", parts, dpre)

        def together() -> None:
            self.matmuls.run(fused, dpre, dy, w, aux=pre)
            sums()

        fused = replace(self._kind(dpre, dy, w), epilogue="dgelu")
        allowed = act == "gelu" and not again and self._type != "float64"
        self._fastest(fused, allowed, together, apart)
        if db is not None:
            self._bias(db, dpre, parts)

    def _bias(self, to: BiasGradient, dy: Array, parts: Array | None = None) -> None:
        """Sum the rows of dy, from sums over parts of its rows (parts, c) if they are given."""
        if parts is None:
            parts = self._parts(dy)
            self._slices("reduce", "sum_slices", parts, dy)
        sum_parts(self.launcher, to.db, parts, slice(0, dy.shape[1]), to.accumulate)

    def _parts(self, dy: Array) -> Array:
        """Return memory for the sums over slices of its rows."""
        n, c = dy.shape
        _, w = self.launcher.variant("sum_slices", c, dy)
        most = 4 * self.device.multiprocessors // -(-c // (WARP * w))
        return self.launcher.scratch("columns", (max(1, min(-(-n // SLICE), most)), c), self.accum_dtype)

    def _slices(self, source: str, kernel: str, parts: Array, x: Array, *others: Array | int) -> None:
        """Start a kernel that sums slices of the rows of x, WARP columns in parallel."""
        n, c = x.shape
        variant, w = self.launcher.variant(kernel, c, x, *others)
        grid = (-(-c // (WARP * w)), len(parts))
        self.launcher.start(source, variant, grid, DOWN * WARP, parts, x, *others, n, c)

    def _kind(
        self, out: Array, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False
    ) -> Matmul:
        m, n = out.shape
        k = a.shape[0] if transpose_a else a.shape[1]
        out_type = TYPE_OF[np.dtype(out.dtype)]
        row = a.strides[0] // a.itemsize
        stride = 0 if row == a.shape[1] or len(a) == 1 else row
        return Matmul(m, n, k, transpose_a, transpose_b, self._type, out_type, stride=stride)

    def _matmul(
        self,
        out: Array,
        a: Array,
        b: Array,
        transpose_b: bool = False,
        bias: Array | None = None,
        onto: Array | None = None,
    ) -> None:
        """Compute out ← onto + a b + bias."""
        plain = replace(self._kind(out, a, b, transpose_b=transpose_b), onto=onto is not None)
        fused = replace(plain, epilogue="bias")
        if bias is not None and self._can(fused):
            self.matmuls.run(fused, out, a, b, bias=bias, onto=onto)
            return
        self.matmuls.run(plain, out, a, b, onto=onto)
        if bias is not None:
            self.launcher.each(
                "elementwise", "add_bias", out.shape[1], out.size, out, bias, out.size, out.shape[1]
            )

    def _fastest(self, fused: Matmul, allowed: bool, together: Work, apart: Work) -> None:
        """Run the faster implementation: the library's fused matmul, or multiple steps."""
        if allowed and self._can(fused):
            self.device.fastest(fused, (together, apart))
        else:
            apart()

    def _can(self, kind: Matmul) -> bool:
        if kind not in self._possible:
            self._possible[kind] = self.matmuls.can(kind)
        return self._possible[kind]


def _sizes(y: Array, act: str) -> tuple[int, ...]:
    """Return the size arguments of an activation kernel. A gated one also needs the width."""
    return (y.size, y.shape[1]) if ACTIVATIONS[act].gated else (y.size,)


def sum_parts(launcher: Launcher, out: Array, partial: Array, columns: slice, accumulate: bool) -> None:
    """Compute out[c] ← Σ over parts of partial[:, columns][:, c].

    If `columns` is longer than `out`, the extra sums are written to the memory after `out`.
    """
    (parts, stride), width = partial.shape, columns.stop - columns.start
    args = (out, partial.reshape(-1)[columns.start :], parts, stride, width, int(accumulate))
    launcher.start("reduce", "sum_parts", -(-width // WARP), LARGEST_BLOCK, *args)

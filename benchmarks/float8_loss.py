"""Train with matmuls that read float8, on a CPU: what `--float8` costs in loss.

    python benchmarks/float8_loss.py none|linear|all TRAIN-OPTIONS …

Takes the options of `distgpt train`, --dtype bfloat16 among them. Each tensor is rounded to float8 and back
before a matmul, with a power of two as its scale, so that bfloat16 holds it exactly. Sums are taken in
float32; a GPU's have fewer bits. `linear`: in y = x wᵀ and dx = dy w, also of the logits' gradient, which
`--float8` leaves as it is. `all`: in gradients of weights, too. With --threads 1: a tensor has one scale.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from float8 import E4M3, E5M2, Float8, power_for, rounded

from distgpt.cli import main
from distgpt.core.cpu import kernels as cpu
from distgpt.core.ops.api import ALL_ROWS, Affine, Array
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16


@cache
def _rounded_bits(power: int, kind: Float8) -> Array:
    """Return, for the bits of every bfloat16, those of what float8 leaves of it at this scale."""
    values = from_bfloat16(np.arange(1 << 16)).astype(np.float64)
    kept = np.ldexp(rounded(np.ldexp(np.nan_to_num(values), power), kind), -power)
    return to_bfloat16(np.where(np.isfinite(values), kept, np.nan))


def _through(bits: Array, kind: Float8) -> Array:
    greatest = from_bfloat16(np.array((bits & 0x7FFF).max(), np.uint16))
    return _rounded_bits(power_for(float(greatest), kind), kind)[bits]


class ThroughFloat8(cpu.Bfloat16Kernels):
    """Bfloat16Kernels whose matmuls see what float8 leaves of a tensor."""

    slice_rows = ALL_ROWS  # a tensor has one scale
    gradients = False

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        super().linear(y, _through(x, E4M3), Affine(_through(wb.w, E4M3), wb.b), onto)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        super().linear_backward(dx, _through(dy, E5M2), _through(w, E4M3))

    def linear_backward_weights(
        self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Any = None
    ) -> None:
        if self.gradients:
            dy, x = _through(dy, E5M2), _through(x, E4M3)
        super().linear_backward_weights(dwb, dy, x, accumulate, sums)


if __name__ == "__main__":
    how = sys.argv.pop(1)
    if how != "none":
        ThroughFloat8.gradients = how == "all"
        cpu.Bfloat16Kernels = ThroughFloat8  # type: ignore[misc]
    sys.argv.insert(1, "train")
    main()

"""The terms of a GPU's parts: storage types of arrays, kinds of matmul, the interface of attention.

Three storage types exist. Arrays of bfloat16 hold its bits in the dtype uint16: neither NumPy nor CuPy
needs to know the type, and whoever needs the values converts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distgpt.core.ops.api import Array, AttentionMask, Floats2d, Wide2d

DeviceArray = Any  # CuPy's, of which no types are known

STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
WIDE = STORAGE | {"bfloat16": STORAGE["float32"]}
TYPE_OF = {dtype: name for name, dtype in STORAGE.items()}


def address(array: Array) -> int:
    """Return the address of an array of CuPy or NumPy."""
    data = array.data
    return int(data.ptr if hasattr(data, "ptr") else array.ctypes.data)


@dataclass(frozen=True, slots=True)
class Matmul:
    """A kind of matmul, out (m, n) ← a (m, k) · b (k, n), everything row-major, without gaps but
    for `stride`.

    With `transpose_a`, a is stored as (k, m); with `transpose_b`, b as (n, k). Types are "bfloat16",
    "float32" or "float64"; sums are taken in one of the latter. `epilogue`, with `extra` beside the factors:

    | epilogue    | meaning                                                       | extra    |
    |-------------|---------------------------------------------------------------|----------|
    | "none"      | out ← a b, or += with `accumulate`                            |          |
    | "bias"      | out ← a b + bias, bias (n,) of the type of out                | bias     |
    | the same, `onto` | out ← onto + …, onto (m, n) of the type of out           | onto     |
    | "gelu"      | aux ← a b (+ bias, if one is given); out ← gelu(aux), tanh    | aux      |
    | "dgelu"     | out ← (a b) · gelu'(aux)                                      | aux      |
    | "column_sums" | out ← aᵀ-product as "none", bias ← Σ over k of a (m,), the type of out | bias |

    `batch`: as many matmuls at once; the matrices of each operand follow each other without gaps.
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    in_type: str
    out_type: str
    epilogue: str = "none"
    accumulate: bool = False
    has_bias: bool = False  # for "gelu"
    onto: bool = False
    stride: int = 0  # elements between rows of a, where it is columns of a wider array
    batch: int = 1


class Attention(Protocol):
    """A library's causal attention on packed qkv, as `Kernels.attention` has it.

    lse has a column for each head. Libraries only get masks without positions and window.
    """

    def forward(self, y: Floats2d, lse: Wide2d, qkv: Floats2d, mask: AttentionMask) -> None:
        """Compute y, and lse: B·H·T elements of float32, (B, H, T)."""

    def backward(
        self,
        dqkv: Floats2d,
        dy: Floats2d,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        mask: AttentionMask,
        sums: bool = False,
    ) -> Wide2d | None:
        """Compute dqkv. With `sums`, return its sums over parts of the rows, if cheap."""

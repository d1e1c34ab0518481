"""Matrix products through CuPy alone, for machines without cuBLASLt: slower, and not to be recorded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from distgpt.errors import UsageError
from distgpt.gpu.api import Array, Product


class CupyProducts:
    """`Products` from the `matmul` of an array module, CuPy on a GPU."""

    recordable = False  # it allocates, and cuBLAS refuses to be captured

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def can(self, product: Product) -> bool:
        return product.epilogue == "none" or (product.epilogue == "bias" and not product.accumulate)

    def run(
        self,
        product: Product,
        out: Array,
        a: Array,
        b: Array,
        bias: Array | None = None,
        aux: Array | None = None,
    ) -> None:
        if not self.can(product):
            raise UsageError(f"CuPy alone can't compute {product}: install cuBLASLt (nvidia-cublas)")
        m, n, k = product.m, product.n, product.k
        left = _numbers(a, product.in_type).reshape((k, m) if product.transpose_a else (m, k))
        right = _numbers(b, product.in_type).reshape((n, k) if product.transpose_b else (k, n))
        if product.in_type != product.out_type:  # matmul would round its sums to the type of the factors
            left, right = left.astype(product.out_type), right.astype(product.out_type)
        result = self._xp.matmul(
            left.T if product.transpose_a else left, right.T if product.transpose_b else right
        )
        target = _numbers(out, product.out_type).reshape(m, n)
        if product.accumulate:
            target += result
        elif bias is not None:
            self._xp.add(result, _numbers(bias, product.out_type), out=target)
        else:
            target[...] = result


def _numbers(array: Array, stored: str) -> Array:
    """The same memory as numbers, where it is seen as the bits of bfloat16."""
    if stored != "bfloat16":
        return array
    try:
        return array.view(import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise UsageError(
            "bfloat16 without cuBLASLt needs the package ml_dtypes: pip install ml_dtypes"
        ) from None

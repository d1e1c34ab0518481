"""Matrix products with all epilogues on the host device, by NumPy."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from hostdevice import HostDevice, HostDeviceError

from distgpt.gpu.api import Product
from distgpt.gpu.dtypes import STORAGE, from_bfloat16, to_bfloat16

_EPILOGUES = ("none", "bias", "gelu", "dgelu", "column_sums")
_ACCUMULATING = ("none", "column_sums")


class HostProducts:
    """Implements `distgpt.gpu.api.Products`; `without` names epilogues that this library shall not have."""

    def __init__(self, device: HostDevice, without: Collection[str] = ()) -> None:
        assert set(without) <= set(_EPILOGUES)
        self.products: list[Product] = []  # computed so far
        self._device = device
        self._without = without
        self._planned: set[Product] = set()

    def can(self, product: Product) -> bool:
        if self._device.recording:
            raise HostDeviceError(f"planning cannot be recorded: {product}")
        possible = product.epilogue in _EPILOGUES and product.epilogue not in self._without
        possible &= not product.accumulate or product.epilogue in _ACCUMULATING
        possible &= not product.has_bias or product.epilogue == "gelu"
        if possible:
            self._planned.add(product)
        return possible

    def run(
        self,
        product: Product,
        out: Any,
        a: Any,
        b: Any,
        bias: Any | None = None,
        aux: Any | None = None,
    ) -> None:
        if product not in self._planned and not self.can(product):
            raise HostDeviceError(f"no way to compute {product}")
        self._check(product, {"out": out, "a": a, "b": b, "bias": bias, "aux": aux})
        self._device.do(lambda: self._compute(product, out, a, b, bias, aux))

    def _check(self, product: Product, arrays: dict[str, Any]) -> None:
        m, n, k = product.m, product.n, product.k
        factor, result = STORAGE[product.in_type], STORAGE[product.out_type]
        wanted = {
            "out": ((m, n), result),
            "a": ((k, m) if product.transpose_a else (m, k), factor),
            "b": ((n, k) if product.transpose_b else (k, n), factor),
        }
        if product.epilogue in ("bias", "column_sums") or product.has_bias:
            wanted["bias"] = ((m if product.epilogue == "column_sums" else n,), result)
        if product.epilogue in ("gelu", "dgelu"):
            wanted["aux"] = ((m, n), result)
        given = {name: array for name, array in arrays.items() if array is not None}
        if given.keys() != wanted.keys():
            raise HostDeviceError(f"{sorted(given)} were given for {product}")
        for name, (shape, dtype) in wanted.items():
            array = given[name]
            self._device.owner(array, f"{name} of {product}")
            if array.size != math.prod(shape) or array.dtype != dtype or not array.flags.c_contiguous:
                raise HostDeviceError(f"{name} is {array.dtype}{list(array.shape)} for {product}")
            if name != "out" and np.shares_memory(array, given["out"]):
                raise HostDeviceError(f"{name} overlaps out for {product}")

    def _compute(self, product: Product, out: Any, a: Any, b: Any, bias: Any, aux: Any) -> None:
        self.products.append(product)
        m, n, k = product.m, product.n, product.k
        left, right = _wide(a), _wide(b)
        left = left.reshape(k, m).T if product.transpose_a else left.reshape(m, k)
        right = right.reshape(n, k).T if product.transpose_b else right.reshape(k, n)
        result = left @ right
        if product.accumulate:
            result = result + _wide(out).reshape(m, n)
        if product.epilogue == "column_sums":
            _put(bias, left.sum(1))
        elif bias is not None:
            result = result + _wide(bias).reshape(n)
        if product.epilogue == "gelu":
            _put(aux, result)
            result = _gelu(result)[0]
        elif product.epilogue == "dgelu":
            result = result * _gelu(_wide(aux).reshape(m, n))[1]
        _put(out, result)


def _wide(array: Any) -> Any:
    return from_bfloat16(array) if array.dtype == STORAGE["bfloat16"] else array


def _put(array: Any, numbers: Any) -> None:
    narrow = to_bfloat16(numbers) if array.dtype == STORAGE["bfloat16"] else numbers
    array[...] = narrow.reshape(array.shape)


def _gelu(x: Any) -> tuple[Any, Any]:
    """gelu(x) by the tanh formula, and its slope"""
    a = math.sqrt(2 / math.pi)
    t = np.tanh(a * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), slope

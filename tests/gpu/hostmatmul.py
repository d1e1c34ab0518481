"""Matmuls with all epilogues on the host device, by NumPy."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from hostdevice import HostDevice, HostDeviceError

from distgpt.gpu.api import STORAGE, Matmul, from_bfloat16, to_bfloat16

_EPILOGUES = ("none", "bias", "gelu", "dgelu", "column_sums")
_ACCUMULATING = ("none", "column_sums")


class HostMatmul:
    """Implements `distgpt.gpu.api.MatmulLibrary`; `without` names epilogues that it does not have."""

    def __init__(self, device: HostDevice, without: Collection[str] = ()) -> None:
        assert set(without) <= set(_EPILOGUES)
        self.kinds: list[Matmul] = []  # computed so far
        self._device = device
        self._without = without
        self._planned: set[Matmul] = set()

    def can(self, kind: Matmul) -> bool:
        if self._device.recording:
            raise HostDeviceError(f"planning cannot be recorded: {kind}")
        possible = kind.epilogue in _EPILOGUES and kind.epilogue not in self._without
        possible &= not kind.accumulate or kind.epilogue in _ACCUMULATING
        possible &= not kind.has_bias or kind.epilogue == "gelu"
        if possible:
            self._planned.add(kind)
        return possible

    def run(
        self,
        kind: Matmul,
        out: Any,
        a: Any,
        b: Any,
        bias: Any | None = None,
        aux: Any | None = None,
    ) -> None:
        if kind not in self._planned and not self.can(kind):
            raise HostDeviceError(f"no way to compute {kind}")
        self._check(kind, {"out": out, "a": a, "b": b, "bias": bias, "aux": aux})
        self._device.do(lambda: self._compute(kind, out, a, b, bias, aux))

    def _check(self, kind: Matmul, arrays: dict[str, Any]) -> None:
        m, n, k = kind.m, kind.n, kind.k
        factor, result = STORAGE[kind.in_type], STORAGE[kind.out_type]
        wanted = {
            "out": ((m, n), result),
            "a": ((k, m) if kind.transpose_a else (m, k), factor),
            "b": ((n, k) if kind.transpose_b else (k, n), factor),
        }
        if kind.epilogue in ("bias", "column_sums") or kind.has_bias:
            wanted["bias"] = ((m if kind.epilogue == "column_sums" else n,), result)
        if kind.epilogue in ("gelu", "dgelu"):
            wanted["aux"] = ((m, n), result)
        given = {name: array for name, array in arrays.items() if array is not None}
        if given.keys() != wanted.keys():
            raise HostDeviceError(f"{sorted(given)} were given for {kind}")
        for name, (shape, dtype) in wanted.items():
            array = given[name]
            self._device.owner(array, f"{name} of {kind}")
            if array.size != math.prod(shape) or array.dtype != dtype or not array.flags.c_contiguous:
                raise HostDeviceError(f"{name} is {array.dtype}{list(array.shape)} for {kind}")
            if name != "out" and np.shares_memory(array, given["out"]):
                raise HostDeviceError(f"{name} overlaps out for {kind}")

    def _compute(self, kind: Matmul, out: Any, a: Any, b: Any, bias: Any, aux: Any) -> None:
        self.kinds.append(kind)
        m, n, k = kind.m, kind.n, kind.k
        left, right = _wide(a), _wide(b)
        left = left.reshape(k, m).T if kind.transpose_a else left.reshape(m, k)
        right = right.reshape(n, k).T if kind.transpose_b else right.reshape(k, n)
        result = left @ right
        if kind.accumulate:
            result = result + _wide(out).reshape(m, n)
        if kind.epilogue == "column_sums":
            _put(bias, left.sum(1))
        elif bias is not None:
            result = result + _wide(bias).reshape(n)
        if kind.epilogue == "gelu":
            _put(aux, result)
            result = _gelu(result)[0]
        elif kind.epilogue == "dgelu":
            result = result * _gelu(_wide(aux).reshape(m, n))[1]
        _put(out, result)


def _wide(array: Any) -> Any:
    return from_bfloat16(array) if array.dtype == STORAGE["bfloat16"] else array


def _put(array: Any, values: Any) -> None:
    narrow = to_bfloat16(values) if array.dtype == STORAGE["bfloat16"] else values
    array[...] = narrow.reshape(array.shape)


def _gelu(x: Any) -> tuple[Any, Any]:
    """gelu(x) by the tanh formula, and its derivative"""
    a = math.sqrt(2 / math.pi)
    t = np.tanh(a * (x + 0.044715 * x**3))
    derivative = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), derivative

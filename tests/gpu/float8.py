"""float8 in plain NumPy: what experimental/float8.cu rounds to and cuBLASLt reads, as values and as bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Float8(NamedTuple):
    """A format: bits of the mantissa, bias of the exponent, the code of the largest number."""

    mantissa: int
    bias: int
    largest: int

    @property
    def most(self) -> float:
        return float(from_float8(np.uint8(self.largest), self))


E4M3, E5M2 = Float8(3, 7, 0x7E), Float8(2, 15, 0x7B)


def from_float8(codes: Any, kind: Float8) -> Any:
    """Return the numbers of these bytes; NaN for those beyond the largest."""
    magnitude = np.asarray(codes, np.int32) & 0x7F
    fraction, exponent = magnitude % (1 << kind.mantissa), magnitude >> kind.mantissa
    normal = fraction + (exponent > 0) * (1 << kind.mantissa)
    values = np.ldexp(normal.astype(np.float64), np.maximum(exponent, 1) - kind.bias - kind.mantissa)
    values = np.where(magnitude > kind.largest, np.nan, values)
    return np.where(np.asarray(codes) & 0x80, -values, values)


def rounded(values: Any, kind: Float8) -> Any:
    """Return the nearest numbers of the format, ties to even; the largest for what lies beyond it."""
    x = np.asarray(values, np.float64)
    _, exponent = np.frexp(x)
    step = np.maximum(exponent - 1, 1 - kind.bias) - kind.mantissa
    return np.clip(np.ldexp(np.rint(np.ldexp(x, -step)), step), -kind.most, kind.most)


def power_for(greatest: float, kind: Float8) -> int:
    """Return the power of two that brings a tensor's greatest magnitude nearest to the largest number."""
    if greatest == 0:
        return 0
    fraction, exponent = np.frexp(np.float64(greatest))
    most, above = np.frexp(kind.most)
    return int(min(above - exponent - (fraction > most), 126))


def through_float8(values: Any, kind: Float8) -> Any:
    """Return what is left of a tensor that is scaled, rounded to float8, and scaled back."""
    x = np.asarray(values, np.float64)
    power = power_for(np.abs(x).max(initial=0), kind)
    return np.ldexp(rounded(np.ldexp(x, power), kind), -power)

"""The types numbers are stored in on a GPU, and bfloat16 as the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np

STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
WIDE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
TYPE_OF = {dtype: name for name, dtype in STORAGE.items()}


def to_bfloat16(numbers: Any) -> Any:
    """The bits (uint16) of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(numbers), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: Any) -> Any:
    """The same numbers as float32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)

"""Types of elements in GGUF: the bytes of a block of them, and the floats that it stands for.

A block is a row of a structured array; `restore` makes (blocks, elements) of float32 from it, in the order
of operations of llama.cpp, so that both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # of NumPy, also structured


@dataclass(frozen=True, slots=True)
class Type:
    """A type by its name there: how many elements a block has, and what lies in it."""

    name: str
    size: int
    block: np.dtype[Any]
    restore: Callable[[Array], Array]


def _half(block: Array, field: str = "d") -> Array:
    """Return the scale of each block, in a column."""
    return block[field].astype(np.float32)[:, None]


def _nibbles(packed: Array, width: int) -> Array:
    """Return the lower halves of each `width` bytes, then the upper ones: (blocks, groups, width)."""
    parts = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), -1, width)


def _pairs_of_bits(packed: Array) -> Array:
    """Return the lowest two bits of each 32 bytes, then the next: (blocks, groups, 32)."""
    parts = packed.reshape(len(packed), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (parts & 3).reshape(len(packed), -1, 32)


def _bits(packed: Array) -> Array:
    """Return the lowest bit of 32 bytes, then the next: (blocks, 8, 32)."""
    return packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1


def _of_32(block: Array) -> Array:
    """Q4_0, Q4_1, Q5_0, Q5_1: four bits, perhaps a fifth; about a middle, or from a minimum on."""
    q = _nibbles(block["q"], 16).reshape(-1, 32)
    names = block.dtype.names or ()
    if "high" in names:
        q = q | np.unpackbits(block["high"], axis=1, bitorder="little") << 4
    if "m" in names:
        return q * _half(block) + _half(block, "m")
    return (q.astype(np.float32) - (16 if "high" in names else 8)) * _half(block)


def _q2_k(block: Array) -> Array:
    q, of = _pairs_of_bits(block["q"]).reshape(-1, 16, 16), block["scales"]
    return (_half(block) * (of & 15))[..., None] * q - (_half(block, "m") * (of >> 4))[..., None]


def _q3_k(block: Array) -> Array:
    q = _pairs_of_bits(block["q"]).astype(np.int8) - ((1 - _bits(block["high"]).astype(np.int8)) << 2)
    packed = block["scales"]
    low = _nibbles(packed[:, :8], 8).reshape(-1, 16)
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.int8) - 32
    return (_half(block) * scales)[..., None] * q.reshape(-1, 16, 16)


def _q45_k(block: Array) -> Array:
    """Q4_K and Q5_K: eight groups of 32, with scales and minima of six bits."""
    q, packed = _nibbles(block["q"], 32), block["scales"]
    if "high" in (block.dtype.names or ()):
        q = q | _bits(block["high"]) << 4
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return (_half(block) * scales)[..., None] * q - (_half(block, "m") * minima)[..., None]


def _q6_k(block: Array) -> Array:
    low = block["q"].reshape(-1, 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
    q = (low | _pairs_of_bits(block["high"]) << 4).astype(np.int8) - 32
    return (_half(block) * block["scales"])[..., None] * q.reshape(-1, 16, 16)


def _type(name: str, size: int, fields: list[tuple[Any, ...]], restore: Callable[[Array], Array]) -> Type:
    return Type(name, size, np.dtype(fields), restore)


_D, _M = ("d", "<f2"), ("m", "<f2")
_SIX = ("scales", "u1", 12)
TYPES = {
    0: _type("F32", 1, [("x", "<f4")], lambda block: block["x"][:, None]),
    1: _type("F16", 1, [("x", "<f2")], lambda block: block["x"].astype(np.float32)[:, None]),
    30: _type("BF16", 1, [("x", "<u2")], lambda b: (b["x"].astype("<u4") << 16).view("<f4")[:, None]),
    2: _type("Q4_0", 32, [_D, ("q", "u1", 16)], _of_32),
    3: _type("Q4_1", 32, [_D, _M, ("q", "u1", 16)], _of_32),
    6: _type("Q5_0", 32, [_D, ("high", "u1", 4), ("q", "u1", 16)], _of_32),
    7: _type("Q5_1", 32, [_D, _M, ("high", "u1", 4), ("q", "u1", 16)], _of_32),
    8: _type("Q8_0", 32, [_D, ("q", "i1", 32)], lambda block: block["q"] * _half(block)),
    10: _type("Q2_K", 256, [("scales", "u1", 16), ("q", "u1", 64), _D, _M], _q2_k),
    11: _type("Q3_K", 256, [("high", "u1", 32), ("q", "u1", 64), _SIX, _D], _q3_k),
    12: _type("Q4_K", 256, [_D, _M, _SIX, ("q", "u1", 128)], _q45_k),
    13: _type("Q5_K", 256, [_D, _M, _SIX, ("high", "u1", 32), ("q", "u1", 128)], _q45_k),
    14: _type("Q6_K", 256, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
}
NUMBERS = {each.name: number for number, each in TYPES.items()}


def restored(kind: Type, blocks: Array) -> Array:
    """Return the float32 elements of some blocks, in one dimension."""
    with np.errstate(all="ignore"):  # whoever reads looks for what is not finite
        return kind.restore(blocks).reshape(-1)


def quantised(kind: Type, elements: Array) -> Array:
    """Return blocks of Q8_0 or Q4_0 that are nearest to these elements, rounded as llama.cpp does."""
    x = np.ascontiguousarray(elements, np.float32).reshape(-1, kind.size)
    blocks = np.empty(len(x), kind.block)
    size = np.abs(x)
    if kind.name == "Q8_0":
        scale = size.max(axis=1, keepdims=True) / np.float32(127)
    else:  # the element furthest from 0 becomes -8
        scale = np.take_along_axis(x, size.argmax(axis=1)[:, None], axis=1) / np.float32(-8)
    scaled = x * np.divide(np.float32(1), scale, where=scale != 0, out=np.zeros_like(scale))
    with np.errstate(over="ignore"):
        blocks["d"] = scale[:, 0]
    if kind.name == "Q8_0":
        blocks["q"] = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    else:
        q = np.clip(np.floor(scaled + np.float32(8.5)), 0, 15).astype(np.uint8)
        blocks["q"] = q[:, :16] | q[:, 16:] << 4
    return blocks

"""GGUF files: metadata by name, then tensors. Checked and read tensor by tensor, written durably.

    "GGUF", version, counts · key, kind, value … · name, shape, type, place … · the data, each tensor aligned

Sizes in a file are checked against the file's size before memory is allocated. A block of elements is an
element of a structured array. `restore` converts blocks to float32 (blocks, elements) with llama.cpp's order
of operations, so that results are bitwise identical.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import Direct, atomic_file, open_regular, storage_errors
from distgpt.core.ops.low_precision import BLOCK, BLOCKS, from_bfloat16, from_blocks

Array = Any  # a NumPy array, possibly structured


@dataclass(frozen=True, slots=True)
class Type:
    """A GGUF type, with its elements per block and the layout of a block."""

    name: str
    size: int
    block: np.dtype[Any]
    restore: Callable[[Array], Array]


def _half(block: Array, field: str = "d") -> Array:
    """Return the scale of each block, as a column."""
    return block[field].astype(np.float32)[:, None]


def _nibbles(packed: Array, width: int) -> Array:
    """Return the lower halves of each `width` bytes, then the upper ones: (blocks, groups, width)."""
    parts = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), -1, width)


def _pairs_of_bits(packed: Array) -> Array:
    """Return the lowest two bits of each 32 bytes, then the next two, and so on: (blocks, groups, 32)."""
    parts = packed.reshape(len(packed), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (parts & 3).reshape(len(packed), -1, 32)


def _bits(packed: Array) -> Array:
    """Return the lowest bit of 32 bytes, then the next, and so on: (blocks, 8, 32)."""
    return packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1


def _of_32(block: Array) -> Array:
    """Restore Q4_1, Q5_0 or Q5_1: 4 or 5 bits, centered or from a minimum."""
    q = _nibbles(block["q"], 16).reshape(-1, 32)
    names = block.dtype.names or ()
    if "high" in names:
        q = q | np.unpackbits(block["high"], axis=1, bitorder="little") << 4
    if "m" in names:
        return q * _half(block) + _half(block, "m")
    return (q.astype(np.float32) - 16) * _half(block)


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
    """Restore Q4_K or Q5_K: eight groups of 32, with scales and minima of six bits."""
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
    30: _type("BF16", 1, [("x", "<u2")], lambda block: from_bfloat16(block["x"])[:, None]),
    2: Type("Q4_0", BLOCK, BLOCKS["Q4_0"], from_blocks),
    3: _type("Q4_1", 32, [_D, _M, ("q", "u1", 16)], _of_32),
    6: _type("Q5_0", 32, [_D, ("high", "u1", 4), ("q", "u1", 16)], _of_32),
    7: _type("Q5_1", 32, [_D, _M, ("high", "u1", 4), ("q", "u1", 16)], _of_32),
    8: Type("Q8_0", BLOCK, BLOCKS["Q8_0"], from_blocks),
    10: _type("Q2_K", 256, [("scales", "u1", 16), ("q", "u1", 64), _D, _M], _q2_k),
    11: _type("Q3_K", 256, [("high", "u1", 32), ("q", "u1", 64), _SIX, _D], _q3_k),
    12: _type("Q4_K", 256, [_D, _M, _SIX, ("q", "u1", 128)], _q45_k),
    13: _type("Q5_K", 256, [_D, _M, _SIX, ("high", "u1", 32), ("q", "u1", 128)], _q45_k),
    14: _type("Q6_K", 256, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D], _q6_k),
}
NUMBERS = {each.name: number for number, each in TYPES.items()}


def restored(kind: Type, blocks: Array) -> Array:
    """Return the float32 elements of blocks, flattened."""
    with np.errstate(all="ignore"):  # the reader checks for non-finite values
        return kind.restore(blocks).reshape(-1)


def quantised(kind: Type, elements: Array) -> Array:
    """Return the nearest blocks of Q8_0 or Q4_0, rounded as in llama.cpp."""
    x = np.ascontiguousarray(elements, np.float32).reshape(-1, kind.size)
    blocks = np.empty(len(x), kind.block)
    size = np.abs(x)
    if kind.name == "Q8_0":
        scale = size.max(axis=1, keepdims=True) / np.float32(127)
    else:  # the element farthest from 0 becomes -8
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


MAGIC = b"GGUF"
_VERSIONS, _ALIGNMENT = (2, 3), 32
_MOST_HEADER = 1 << 28  # bytes; a vocabulary of a million entries needs 1/10 of it
_PIECE = 1 << 20  # elements read at a time
# `struct` formats by kind of metadata value. Text and lists have no format.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBER_OF = {form: number for number, form in _FORMATS.items()}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's type, its shape in NumPy's order, and its offset in the file."""

    kind: Type
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        return prod(self.shape) // self.kind.size * self.kind.block.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A list of numbers in metadata. It equals no other value, so it is safe to compare with any type."""

    array: Array


@dataclass(frozen=True, slots=True)
class Container:
    """The header of a file. Metadata values may be of any kind."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def rows(self, name: str, in_blocks: bool = False) -> Iterator[tuple[int, Array]]:
        """Yield (number of the first row, rows in float32 or as stored), some rows at a time."""
        entry = self.tensors[name]
        width = entry.shape[-1]
        rows, step = prod(entry.shape) // width, max(1, _PIECE // width)
        with storage_errors("read", self.path), open_regular(self.path) as file:
            file.seek(entry.start)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                blocks = np.empty(count * width // entry.kind.size, entry.kind.block)
                if file.readinto(blocks.view(np.uint8).data) != blocks.nbytes:
                    raise DataError(f"{self.path} was truncated while being read")
                yield first, (blocks if in_blocks else restored(entry.kind, blocks)).reshape(count, -1)


def is_gguf(path: Path) -> bool:
    """Return whether the file starts like GGUF."""
    with storage_errors("read", path):
        if not path.is_file():
            return False
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC


def read_container(path: Path) -> Container:
    """Return the checked header, or raise a DataError."""
    with storage_errors("read", path), open_regular(path) as file:
        try:
            return Container(path, *_parse(_Front(file)))
        except ValueError as error:
            raise DataError(f"{path} is not a valid GGUF file: {error}") from None


class _Front:
    """A reader of the header. Raises a ValueError if the file is too short."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        self.left = min(self.size, _MOST_HEADER)

    def take(self, count: int) -> bytes:
        if count > self.left:
            at = self.file.tell()
            why = "its header is too long" if self.size > _MOST_HEADER else "truncated or corrupt"
            raise ValueError(f"{why}: {count:,} bytes should follow byte {at:,} of {self.size:,}")
        self.left -= count
        result = self.file.read(count)
        if len(result) != count:
            raise ValueError("truncated while being read")
        return result

    def number(self, form: str) -> Any:
        result = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]
        # A float32 becomes the shortest decimal that rounds to it, such as 1e-05 instead of 9.99…e-06.
        return float(str(np.float32(result))) if form == "f" else result

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise ValueError(f"a string before byte {self.file.tell():,} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self._list(*struct.unpack("<IQ", self.take(12)))
        if kind not in _FORMATS:
            raise ValueError(f"a value before byte {self.file.tell():,} has the unknown type {kind}")
        return self.number(_FORMATS[kind])

    def _list(self, kind: int, count: int) -> Any:
        if kind == _TEXT:
            if count > self.left // 8:
                self.take(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _FORMATS:
            raise ValueError(f"a list before byte {self.file.tell():,} has the unknown type {kind}")
        dtype = np.dtype(_FORMATS[kind]).newbyteorder("<")
        return Numbers(np.frombuffer(self.take(count * dtype.itemsize), dtype))


def _parse(front: _Front) -> tuple[dict[str, Any], dict[str, Entry]]:
    if front.take(4) != MAGIC:
        raise ValueError("it does not start with GGUF")
    version = front.number("I")
    if version not in _VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("it is big-endian" if big else f"its version is {version}, not 2 or 3")
    tensors, values = front.number("Q"), front.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = front.text()
        if key in metadata:
            raise ValueError(f"duplicate key {key!r:.80}")
        metadata[key] = front.value(front.number("I"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.40}, not a power of two")
    result: dict[str, Entry] = {}
    for _ in range(tensors):
        name = front.text()
        if name in result:
            raise ValueError(f"duplicate tensor {name!r:.80}")
        result[name] = _entry(front, name, alignment)
    start = front.file.tell() + -front.file.tell() % alignment
    entries = {name: Entry(e.kind, e.shape, start + e.start) for name, e in result.items()}
    _refuse_overlaps(entries, start, front.size)
    return metadata, entries


def _entry(front: _Front, name: str, alignment: int) -> Entry:
    """Return a tensor's entry; its offset is relative to the data."""
    which, count = f"tensor {name!r:.80}", front.number("I")
    if not 1 <= count <= 4:
        raise ValueError(f"{which} has {count} dimensions")
    shape = tuple(front.number("Q") for _ in range(count))[::-1]
    number, start = front.number("I"), front.number("Q")
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise ValueError(
            f"{which} has the unknown type {number}; use a file in Q8_0 or Q4_K_M; known: {known}"
        )
    if 0 in shape or shape[-1] % TYPES[number].size:
        raise ValueError(f"{which} has the shape {shape!r:.80}, which {TYPES[number].name} does not support")
    if start % alignment:
        raise ValueError(f"{which} must start at a multiple of {alignment}, not at byte {start:,}")
    return Entry(TYPES[number], shape, start)


def _refuse_overlaps(tensors: Mapping[str, Entry], start: int, size: int) -> None:
    end = start
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise ValueError(f"tensor {name!r:.80} overlaps the preceding one")
        end = entry.start + entry.size
        if end > size:
            raise ValueError(f"tensor {name!r:.80} ends at byte {end:,}, after the file's end at {size:,}")


# -- writing


def write_container(
    path: Path,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Callable[[str], Iterator[Array]],
) -> None:
    """Write tensors of these types and shapes; `pieces` yields each tensor's data in parts."""
    front = [MAGIC, struct.pack("<IQQ", 3, len(kinds), len(metadata))]
    front += [_text(key) + _value(value) for key, value in metadata.items()]
    end = 0
    for name, (kind, shape) in kinds.items():
        entry = Entry(TYPES[NUMBERS[kind]], shape, end + -end % _ALIGNMENT)
        end = entry.start + entry.size
        front.append(
            _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        )
        front.append(struct.pack("<IQ", NUMBERS[kind], entry.start))
    text = b"".join(front)
    with atomic_file(path) as file, Direct(file) as direct:
        direct.write(text + bytes(-len(text) % _ALIGNMENT))
        for name in kinds:
            size = 0
            for piece in pieces(name):
                direct.write(memoryview(piece.reshape(-1).view(np.uint8)))
                size += piece.nbytes
            direct.write(bytes(-size % _ALIGNMENT))


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """Return kind and value. Integers become uint32, floats float32; lists have one kind."""
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _LIST, _TEXT, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _LIST, _NUMBER_OF[value.dtype.char], len(value)) + value.tobytes()
    form = {bool: "?", int: "I", float: "f"}[type(value)]
    return struct.pack(f"<I{form}", _NUMBER_OF[form], value)

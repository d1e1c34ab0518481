"""GGUF files: metadata by name, then tensors. Read strictly, tensor by tensor; written durably.

    "GGUF", version, counts · key, kind, value … · name, shape, type, place … · the data, each tensor aligned

Nothing that a file claims is allocated before it is held against the file's size.
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
from distgpt.models.formats.gguf.blocks import NUMBERS, TYPES, Array, Type, restored

MAGIC = b"GGUF"
_VERSIONS, _ALIGNMENT = (2, 3), 32
_MOST_HEADER = 1 << 28  # bytes: vocabularies of a million entries need a tenth
_PIECE = 1 << 20  # elements in flight at a time
# Kinds of values in metadata: their formats for `struct`, and for texts and lists their numbers alone.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBER_OF = {form: number for number, form in _FORMATS.items()}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its shape as NumPy has it, and where it begins in the file."""

    kind: Type
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Return the bytes that it takes."""
        return prod(self.shape) // self.kind.size * self.kind.block.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A list of numbers in metadata: equal to nothing, so that it may stand where another value belongs."""

    array: Array


@dataclass(frozen=True, slots=True)
class Container:
    """The front of a file. The values of its metadata are of any kind."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def rows(self, name: str) -> Iterator[tuple[int, Array]]:
        """Read a tensor in float32, some rows at a time, each time with the number of the first."""
        entry = self.tensors[name]
        width = entry.shape[-1]
        rows, step = prod(entry.shape) // width, max(1, _PIECE // width)
        with storage_errors("read", self.path), open_regular(self.path) as file:
            file.seek(entry.start)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                blocks = np.empty(count * width // entry.kind.size, entry.kind.block)
                if file.readinto(blocks.view(np.uint8).data) != blocks.nbytes:
                    raise DataError(f"{self.path} was cut short while it was read")
                yield first, restored(entry.kind, blocks).reshape(count, width)


def is_gguf(path: Path) -> bool:
    """Return if the file begins as GGUF does."""
    with storage_errors("read", path):
        if not path.is_file():
            return False
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC


def read_container(path: Path) -> Container:
    """Return everything in front of the data, checked, or a DataError that says what is wrong with it."""
    with storage_errors("read", path), open_regular(path) as file:
        try:
            return Container(path, *_parse(_Front(file)))
        except ValueError as error:
            raise DataError(f"{path} is not a GGUF file that can be read: {error}") from None


class _Front:
    """The bytes in front of the data. A ValueError says that there are fewer than were asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        self.left = min(self.size, _MOST_HEADER)

    def take(self, count: int) -> bytes:
        if count > self.left:
            at = self.file.tell()
            why = "its header is too long" if self.size > _MOST_HEADER else "it is cut short, or damaged"
            raise ValueError(f"{why}: {count:,} bytes are to follow byte {at:,} of {self.size:,}")
        self.left -= count
        found = self.file.read(count)
        if len(found) != count:
            raise ValueError("it was cut short while it was read")
        return found

    def number(self, form: str) -> Any:
        found = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]
        # A float32 comes as the shortest decimal that it is nearest to: 1e-05 and not 9.99…e-06.
        return float(str(np.float32(found))) if form == "f" else found

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise ValueError(f"a text before byte {self.file.tell():,} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self._list(*struct.unpack("<IQ", self.take(12)))
        if kind not in _FORMATS:
            raise ValueError(f"a value before byte {self.file.tell():,} is of the unknown kind {kind}")
        return self.number(_FORMATS[kind])

    def _list(self, kind: int, count: int) -> Any:
        if kind == _TEXT:
            if count > self.left // 8:
                self.take(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _FORMATS:
            raise ValueError(f"a list before byte {self.file.tell():,} is of the unknown kind {kind}")
        dtype = np.dtype(_FORMATS[kind]).newbyteorder("<")
        return Numbers(np.frombuffer(self.take(count * dtype.itemsize), dtype))


def _parse(front: _Front) -> tuple[dict[str, Any], dict[str, Entry]]:
    if front.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = front.number("I")
    if version not in _VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("it is of a big-endian machine" if big else f"its version is {version}, not 2 or 3")
    tensors, values = front.number("Q"), front.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = front.text()
        if key in metadata:
            raise ValueError(f"it has {key!r:.80} twice")
        metadata[key] = front.value(front.number("I"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.40}, not a power of two")
    found: dict[str, Entry] = {}
    for _ in range(tensors):
        name = front.text()
        if name in found:
            raise ValueError(f"it has the tensor {name!r:.80} twice")
        found[name] = _entry(front, name, alignment)
    start = front.file.tell() + -front.file.tell() % alignment
    entries = {name: Entry(e.kind, e.shape, start + e.start) for name, e in found.items()}
    _refuse_overlaps(entries, start, front.size)
    return metadata, entries


def _entry(front: _Front, name: str, alignment: int) -> Entry:
    """Return what is said of a tensor, with its place counted from the beginning of the data."""
    which, count = f"tensor {name!r:.80}", front.number("I")
    if not 1 <= count <= 4:
        raise ValueError(f"{which} has {count} dimensions")
    shape = tuple(front.number("Q") for _ in range(count))[::-1]
    number, start = front.number("I"), front.number("Q")
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise ValueError(f"{which} is of type {number}; known are {known}")
    if 0 in shape or shape[-1] % TYPES[number].size:
        raise ValueError(f"{which} has the shape {shape!r:.80}, which {TYPES[number].name} cannot have")
    if start % alignment:
        raise ValueError(f"{which} begins at byte {start:,}, which is no multiple of {alignment}")
    return Entry(TYPES[number], shape, start)


def _refuse_overlaps(tensors: Mapping[str, Entry], start: int, size: int) -> None:
    end = start
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise ValueError(f"tensor {name!r:.80} overlaps the one before it")
        end = entry.start + entry.size
        if end > size:
            raise ValueError(f"tensor {name!r:.80} ends at byte {end:,}, behind the file's end at {size:,}")


# -- writing


def write_container(
    path: Path,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    pieces: Callable[[str], Iterator[Array]],
) -> None:
    """Write a file of tensors of these types and shapes, whose data `pieces` gives, a strip at a time."""
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
        direct.write(_padded(text))
        for name in kinds:
            size = 0
            for piece in pieces(name):
                direct.write(memoryview(piece.reshape(-1).view(np.uint8)))
                size += piece.nbytes
            direct.write(bytes(-size % _ALIGNMENT))


def _padded(text: bytes) -> bytes:
    return text + bytes(-len(text) % _ALIGNMENT)


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """Return kind and value: whole numbers as uint32, others as float32, lists of one kind."""
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _LIST, _TEXT, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _LIST, _NUMBER_OF[value.dtype.char], len(value)) + value.tobytes()
    form = {bool: "?", int: "I", float: "f"}[type(value)]
    return struct.pack(f"<I{form}", _NUMBER_OF[form], value)

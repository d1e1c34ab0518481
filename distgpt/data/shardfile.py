"""One shard: a .npy file of ids, written so that it appears whole or not at all, and checked in one pass."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distgpt.data.tokenizers.api import Ids
from distgpt.errors import DataError
from distgpt.files import storage_errors, sync_directory
from distgpt.kernels.api import Array

DTYPES = ("<u2", "<u4")
HEADER_BYTES = 128  # of every one-dimensional .npy file
_PIECE = 1 << 22  # bytes looked at together


@dataclass(frozen=True, slots=True)
class Shard:
    """What the manifest says of one file. `split` is "train" or "val", `largest` the largest id in it."""

    name: str
    split: str
    tokens: int
    bytes: int
    sha256: str
    largest: int


def header(dtype: str, tokens: int) -> bytes:
    """The first bytes of the file, as numpy.save writes them."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def file_bytes(dtype: str, tokens: int) -> int:
    return HEADER_BYTES + tokens * np.dtype(dtype).itemsize


class ShardWriter:
    """Takes ids until somebody finishes the file; until then it has another name."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._partial = partial_of(path)
        self.tokens = 0
        self._largest = 0
        with storage_errors("write", path):
            self._file = self._partial.open("wb")
            self._file.write(header(dtype, 0))

    def write(self, ids: Ids) -> None:
        with storage_errors("write", self._path):
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self.tokens += len(ids)
        self._largest = max(self._largest, int(ids.max(initial=0)))

    def finish(self, split: str) -> Shard:
        """On the disk, and under its name. Its hash is of what can be read back."""
        with storage_errors("write", self._path):
            self._file.seek(0)
            self._file.write(header(self._dtype, self.tokens))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            with self._partial.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._partial.replace(self._path)
            sync_directory(self._path.parent)
        size = file_bytes(self._dtype, self.tokens)
        return Shard(self._path.name, split, self.tokens, size, sha256, self._largest)

    def discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._partial.unlink()


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def map_shard(folder: Path, shard: Shard, dtype: str) -> Array:
    """The ids of a file as they lie on the disk; only the header has been read."""
    path = folder / shard.name
    with storage_errors("read", path):
        _check_front(path, shard, dtype)
        return np.memmap(path, dtype, "r", HEADER_BYTES, (shard.tokens,))


def check_shard(
    folder: Path, shard: Shard, dtype: str, vocab_size: int, advanced: Callable[[int], None]
) -> None:
    """Read a file once; a DataError if it is not what the manifest says. `advanced` hears of bytes read."""
    path = folder / shard.name
    buffer = np.empty(_PIECE, np.uint8)
    largest = 0
    with storage_errors("read", path):
        _check_front(path, shard, dtype)
        with path.open("rb", buffering=0) as file:
            digest = hashlib.sha256(file.read(HEADER_BYTES))
            while filled := _fill(file.readinto, buffer):
                piece = buffer[:filled]
                digest.update(piece.data)
                whole = filled - filled % np.dtype(dtype).itemsize
                largest = max(largest, int(piece[:whole].view(dtype).max(initial=0)))
                advanced(filled)
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in the manifest")
    if largest >= vocab_size:
        raise DataError(f"{path} has the token {largest}, but the vocabulary ends at {vocab_size - 1}")
    if largest != shard.largest:
        raise DataError(f"{path}: its largest token is {largest}, in the manifest it is {shard.largest}")


def _fill(readinto: Callable[[memoryview], int | None], buffer: Array) -> int:
    """As many bytes as fit or as are left: one system call may give fewer."""
    filled = 0
    while filled < len(buffer) and (count := readinto(memoryview(buffer)[filled:])):
        filled += count
    return filled


def _check_front(path: Path, shard: Shard, dtype: str) -> None:
    """A DataError unless size and header are exactly those that the manifest leads to expect."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            front = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    if size != shard.bytes:
        raise DataError(f"{path} is damaged: it has {size:,} bytes, in the manifest {shard.bytes:,}")
    if front != header(dtype, shard.tokens):
        raise DataError(f"{path} is damaged: its header is not that of {shard.tokens:,} ids of type {dtype}")

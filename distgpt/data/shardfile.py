"""One shard: a .npy file of token ids that is written, checked and read by its own entry in the manifest."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from distgpt.checked import Must
from distgpt.data.tokenizers.naming import Ids
from distgpt.errors import DataError
from distgpt.files import new_file, open_regular, storage_errors, sync_directory, unfinished
from distgpt.kernels.api import Array

HEADER_BYTES = 128  # of every one-dimensional .npy file
_PIECE = 1 << 22  # bytes verified together
_MOST = 1 << 48  # tokens or bytes of anything
_NAME = re.compile(r"(train|val)-\d{6,12}\.npy")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Size = Annotated[int, Must("be a count", lambda number: 0 <= number < _MOST)]
Sha256 = Annotated[str, Must("be a SHA-256", _SHA256.fullmatch)]


@dataclass(frozen=True, slots=True)
class Shard:
    """The manifest's entry for one file. `split` is "train" or "val", `largest` the largest id in it."""

    name: Annotated[str, Must("be the name of a shard", _NAME.fullmatch)]
    split: Literal["val", "train"]
    tokens: Annotated[Size, Must("be at least 1", bool)]
    bytes: Size
    sha256: Sha256
    largest: Size


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}.npy"


def header(dtype: str, tokens: int) -> bytes:
    """The first bytes of the file, as numpy.save writes them."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({tokens},), }}"
    length = HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def file_bytes(dtype: str, tokens: int) -> int:
    return HEADER_BYTES + tokens * np.dtype(dtype).itemsize


class ShardWriter:
    """Writes ids to a file that gets its name only when it is finished."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, dtype
        self._partial = unfinished(path)
        self.tokens = 0
        self._largest = 0
        with storage_errors("write", path):
            self._file = new_file(self._partial)
            self._file.write(header(dtype, 0))

    def write(self, ids: Ids) -> None:
        with storage_errors("write", self._path):
            self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self.tokens += len(ids)
        self._largest = max(self._largest, int(ids.max(initial=0)))

    def finish(self, split: Any) -> Shard:
        """Put the file on the disk, under its name. Its hash is of what can be read back."""
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


class ShardReader:
    """Reads ids of a file. Not by a memory map, since what is lost from a mapped file kills the process."""

    def __init__(self, folder: Path, shard: Shard, dtype: str) -> None:
        self._path, self._dtype = folder / shard.name, np.dtype(dtype)
        self._descriptor: int | None = None
        with storage_errors("read", self._path):
            _check_front(self._path, shard, dtype)

    def read(self, out: Array, start: int) -> None:
        """out ← the ids from `start` on; a DataError if the file has become too short for that."""
        offset = HEADER_BYTES + start * self._dtype.itemsize
        with storage_errors("read", self._path):
            if self._descriptor is None:
                with open_regular(self._path) as file:
                    self._descriptor = os.dup(file.fileno())
            if not read_at(self._descriptor, memoryview(out.view(np.uint8)), offset):
                raise DataError(f"{self._path} has been cut short since it was opened")

    def close(self) -> None:
        """Until the next `read`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def read_at(descriptor: int, out: memoryview, offset: int) -> bool:
    """out ← what a file holds from a byte on; False if it ends before."""
    while out:
        if not (count := os.preadv(descriptor, [out], offset)):
            return False
        out, offset = out[count:], offset + count
    return True


def verify_shard(
    folder: Path,
    shard: Shard,
    dtype: str,
    vocab_size: int,
    advanced: Callable[[int], None] = lambda count: None,
) -> None:
    """Read a file once; a DataError if it is not what the manifest says. `advanced` gets the bytes read."""
    path, kind = folder / shard.name, np.dtype(dtype)
    largest = 0
    with storage_errors("read", path):
        _check_front(path, shard, dtype)
        with open_regular(path) as file:
            digest = hashlib.sha256(file.read(HEADER_BYTES))
            while piece := file.read(_PIECE):
                digest.update(piece)
                ids = np.frombuffer(piece, kind, len(piece) // kind.itemsize)
                largest = max(largest, int(ids.max(initial=0)))
                advanced(len(piece))
    if digest.hexdigest() != shard.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 is not the one in the manifest")
    if largest >= vocab_size:
        raise DataError(f"{path} has the token {largest}, but the vocabulary ends at {vocab_size - 1}")
    if largest != shard.largest:
        raise DataError(f"{path}: its largest token is {largest}, in the manifest it is {shard.largest}")


def _check_front(path: Path, shard: Shard, dtype: str) -> None:
    """Raise a DataError unless size and header are exactly those that the manifest leads to expect."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            front = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    if size != shard.bytes:
        raise DataError(f"{path} is damaged: it has {size:,} bytes, in the manifest {shard.bytes:,}")
    if front != header(dtype, shard.tokens):
        raise DataError(f"{path} is damaged: its header is not that of {shard.tokens:,} ids of type {dtype}")

"""Tokenized documents on their way to another order: in files on the disk, in any number.

Every document has a random key, and its place in the shuffled order is that of its key. Each file takes one
range of keys, so that the keys of a single file are all that has to be sorted in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from distgpt.data.batches import seeded_hashes
from distgpt.data.shardfile import read_at
from distgpt.data.tokenizers.naming import Ids
from distgpt.errors import DataError
from distgpt.files import open_regular, storage_errors, sync_directory
from distgpt.kernels.api import Array

BYTES_EACH = 1 << 29  # of input for each file
MOST_FILES = 256
_RECORD = np.dtype([("key", "<u8"), ("tokens", "<u8")])
Sizes = list[list[int]]  # tokens and records of each file


def files_for(input_bytes: int) -> int:
    return max(1, min(MOST_FILES, input_bytes // BYTES_EACH))


def spool_names(number: int) -> tuple[str, str]:
    return f"spool-{number:03d}.ids", f"spool-{number:03d}.keys"


class Spool:
    """`sizes` say what is valid of each file; what lies behind that, an earlier process left unnoted."""

    def __init__(self, folder: Path, dtype: str, seed: int, sizes: Sizes) -> None:
        self._folder, self._dtype, self._seed = folder, np.dtype(dtype), seed
        self.sizes = [list(pair) for pair in sizes]
        self._ids: list[list[Ids]] = [[] for _ in sizes]
        self._records: list[list[tuple[int, int]]] = [[] for _ in sizes]
        for number, (tokens, records) in enumerate(sizes):
            widths = tokens * self._dtype.itemsize, records * _RECORD.itemsize
            for name, size in zip(spool_names(number), widths, strict=True):
                self._cut(folder / name, size)

    def _cut(self, path: Path, size: int) -> None:
        with storage_errors("write", path), suppress(FileNotFoundError):
            if not size:
                path.unlink()
                return
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size >= size:
                    os.truncate(descriptor, size)
                    return
            finally:
                os.close(descriptor)
        if size:
            raise DataError(f"{path} has lost what was written to it; remove {path.parent} and begin again")

    def add(self, first: int, lengths: list[int], ids: Ids) -> None:
        """Documents, or parts of them, numbered from `first` on, one after the other in `ids`."""
        if not lengths:
            return
        keys = seeded_hashes(self._seed, np.arange(len(lengths), dtype=np.uint64) + np.uint64(first))
        files = (keys >> np.uint64(32)) * np.uint64(len(self.sizes)) >> np.uint64(32)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for file, key, part in zip(files.tolist(), keys.tolist(), parts, strict=True):
            self._ids[file].append(part)
            self._records[file].append((key, len(part)))

    def flush(self) -> Sizes:
        """Put everything on the disk; the sizes of the files then."""
        for number, (ids, records) in enumerate(zip(self._ids, self._records, strict=True)):
            if records:
                content = np.concatenate(ids).astype(self._dtype), np.array(records, _RECORD)
                for name, array, size in zip(spool_names(number), content, self.sizes[number], strict=True):
                    self._append(self._folder / name, array, is_new=not size)
                self.sizes[number][0] += len(content[0])
                self.sizes[number][1] += len(records)
                ids.clear()
                records.clear()
        with storage_errors("write to", self._folder):
            sync_directory(self._folder)
        return [list(pair) for pair in self.sizes]

    def _append(self, path: Path, array: Array, is_new: bool) -> None:
        new = os.O_CREAT | os.O_EXCL if is_new and array.size else 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | new
        if not array.size:
            return
        with storage_errors("write", path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(array.data)
            file.flush()
            os.fsync(file.fileno())

    def documents(self, number: int) -> Iterator[tuple[int, int]]:
        """Where the ids of each document of a file begin, and how many they are, in the new order.

        A document in several parts, which follow each other, is one again.
        """
        path = self._folder / spool_names(number)[1]
        records = np.empty(self.sizes[number][1], _RECORD)
        self._read(path, records)
        keys, begins = records["key"], np.ones(len(records), bool)
        begins[1:] = keys[1:] != keys[:-1]
        ends = np.cumsum(records["tokens"].astype(np.int64))
        first = np.flatnonzero(begins)
        starts = (ends - records["tokens"].astype(np.int64))[first]
        lengths = np.diff(np.append(starts, self.sizes[number][0]))
        order = np.argsort(keys[first], kind="stable")
        return zip(starts[order].tolist(), lengths[order].tolist(), strict=True)

    def _read(self, path: Path, out: Array) -> None:
        if not out.size:
            return
        with storage_errors("read", path), open_regular(path) as file:
            if not read_at(file.fileno(), out, 0):
                raise DataError(f"{path} has been cut short")

    def reader(self, number: int) -> closing[SpoolReader]:
        return closing(SpoolReader(self._folder / spool_names(number)[0], self._dtype))

    def remove(self) -> None:
        for number in range(len(self.sizes)):
            for name in spool_names(number):
                with storage_errors("write to", self._folder):
                    (self._folder / name).unlink(missing_ok=True)


class SpoolReader:
    """Reads ids of one file."""

    AT_ONCE = 1 << 20  # ids

    def __init__(self, path: Path, dtype: np.dtype[np.generic]) -> None:
        self._path, self._dtype = path, dtype
        self._file = open_regular(path) if path.exists() else None  # documents may have no ids

    def read(self, start: int, stop: int) -> Iterator[Ids]:
        """The ids [start, stop), a large number of them in several arrays."""
        for begin in range(start, stop, self.AT_ONCE):
            ids = np.empty(min(stop - begin, self.AT_ONCE), self._dtype)
            with storage_errors("read", self._path):
                if self._file is None or not read_at(self._file.fileno(), ids, begin * self._dtype.itemsize):
                    raise DataError(f"{self._path} has been cut short")
            yield ids

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

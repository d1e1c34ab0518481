"""Tokenized documents on their way to another order: in files on the disk, in any number.

Every document has a key, which gives its place in the order: a random one, or its number where the order of
reading is kept. Each file takes one range of keys, so that only those of a single file are sorted in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import open_regular, storage_errors, sync_directory
from distgpt.core.data.batches import seeded_hashes
from distgpt.core.data.tokenizers import Ids
from distgpt.core.ops.api import Array
from distgpt.texts.shards import read_at

BYTES_EACH = 1 << 29  # of input for each file
MOST_FILES = 256
DOCUMENTS_AT_ONCE = 1 << 16
DOCUMENTS_EACH = 1 << 22  # of a file where the order is kept
_RECORD = np.dtype([("key", "<u8"), ("tokens", "<u8")])
Sizes = list[list[int]]  # tokens and records of each file


def files_for(input_bytes: int) -> int:
    return max(1, min(MOST_FILES, input_bytes // BYTES_EACH))


def spool_names(number: int) -> tuple[str, str]:
    return f"spool-{number:03d}.ids", f"spool-{number:03d}.keys"


class Spool:
    """Token ids on disk before they are shuffled, in several files.

    `sizes` are the valid lengths of each file. Bytes beyond were written by a process that died: ignored.
    """

    def __init__(self, folder: Path, dtype: str, seed: int | None, sizes: Sizes) -> None:
        self._folder, self._dtype, self._seed = folder, np.dtype(dtype), seed
        self.sizes = [list(pair) for pair in sizes]
        self._ids: list[list[Ids]] = [[] for _ in sizes]
        self._records: list[list[Array]] = [[] for _ in sizes]
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
        records = np.empty(len(lengths), _RECORD)
        numbers = np.arange(first, first + len(lengths), dtype=np.uint64)
        records["key"] = numbers if self._seed is None else seeded_hashes(self._seed, numbers)
        records["tokens"] = lengths
        if len(self.sizes) == 1:
            self._ids[0].append(ids)
            self._records[0].append(records)
            return
        if self._seed is None:
            files = np.minimum(numbers // DOCUMENTS_EACH, len(self.sizes) - 1)
        else:
            files = (records["key"] >> np.uint64(32)) * np.uint64(len(self.sizes)) >> np.uint64(32)
        order = np.argsort(files, kind="stable")
        ids = _reordered(ids, records["tokens"].astype(np.int64), order)
        files, records = files[order], records[order]
        cuts = np.flatnonzero(np.diff(files)) + 1  # where another file's begin
        tokens = np.append(0, np.cumsum(records["tokens"], dtype=np.int64))
        parts = zip(np.split(records, cuts), np.split(ids, tokens[cuts]), strict=True)
        for file, (of_file, own) in zip(files[np.append(0, cuts)].tolist(), parts, strict=True):
            self._ids[file].append(own)
            self._records[file].append(of_file)

    def flush(self) -> Sizes:
        """Put everything on the disk; the sizes of the files then."""
        for number, (ids, records) in enumerate(zip(self._ids, self._records, strict=True)):
            if records:
                content = np.concatenate(ids).astype(self._dtype), np.concatenate(records)
                for name, array, size in zip(spool_names(number), content, self.sizes[number], strict=True):
                    self._append(self._folder / name, array, is_new=not size)
                self.sizes[number][0] += len(content[0])
                self.sizes[number][1] += len(content[1])
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

    def documents(self, number: int) -> Iterator[tuple[Array, Array]]:
        """Yield the first position and the number of ids of a file's documents, in order of keys, in batches.

        Adjacent parts of a document that was split are joined.
        """
        starts, lengths, order = self._in_order(number)
        for begin in range(0, len(order), DOCUMENTS_AT_ONCE):
            some = order[begin : begin + DOCUMENTS_AT_ONCE]
            yield starts[some], lengths[some]

    def _in_order(self, number: int) -> tuple[Array, Array, Array]:
        records = np.empty(self.sizes[number][1], _RECORD)
        self._read(self._folder / spool_names(number)[1], records)
        begins = np.ones(len(records), bool)
        begins[1:] = records["key"][1:] != records["key"][:-1]
        first = np.flatnonzero(begins)
        ends = np.append(0, np.cumsum(records["tokens"], dtype=np.int64))
        return (
            ends[first],
            np.diff(ends[np.append(first, len(records))]),
            np.argsort(records["key"][first], kind="stable"),
        )

    def _read(self, path: Path, out: Array) -> None:
        if not out.size:
            return
        with storage_errors("read", path), open_regular(path) as file:
            if not read_at(file.fileno(), out.view(np.uint8).data, 0):
                raise DataError(f"{path} has been cut short")

    def read_ids(
        self, number: int, out: Ids, places: list[int], starts: list[int], lengths: list[int]
    ) -> None:
        """out[place : place + length] ← the ids of a file from `start` on, for each of these."""
        path, width, content = self._folder / spool_names(number)[0], out.itemsize, out.data.cast("B")
        if not any(lengths):  # there may be no such file
            return
        with storage_errors("read", path), open_regular(path) as file:
            for at, start, count in zip(places, starts, lengths, strict=True):
                if not read_at(file.fileno(), content[at * width : (at + count) * width], start * width):
                    raise DataError(f"{path} has been cut short")

    def remove(self) -> None:
        for number in range(len(self.sizes)):
            for name in spool_names(number):
                with storage_errors("write to", self._folder):
                    (self._folder / name).unlink(missing_ok=True)


def _reordered(ids: Ids, lengths: Array, order: Array) -> Ids:
    """Return the ids of documents that follow each other, in another order of these."""
    starts = (np.cumsum(lengths) - lengths)[order]
    lengths = lengths[order]
    ends = np.cumsum(lengths)
    found: Ids = ids[np.arange(len(ids)) + np.repeat(starts - (ends - lengths), lengths)]
    return found

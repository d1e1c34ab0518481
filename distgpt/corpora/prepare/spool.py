"""Tokenized documents on their way to another order: their ids in one file, their lengths in another.

Both files grow in the order of reading. The lengths are read back once all documents are there: places and
order of all documents take 24 bytes each in memory, and the ids stay on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import storage_errors, sync_directory
from distgpt.core.data.batches import seeded_hashes
from distgpt.core.data.tokenizers import Ids
from distgpt.core.ops.api import Array
from distgpt.corpora.shards import read_at

SPOOL = ("spool.ids", "spool.lengths")


class Spool:
    """Token ids on disk before they are shuffled.

    `sizes` are the valid elements of both files. Bytes beyond were written by a process that died: ignored.
    """

    def __init__(self, folder: Path, dtype: str, sizes: Sequence[int]) -> None:
        self._folder, self._sizes, self._dtypes = folder, list(sizes), (np.dtype(dtype), np.dtype("<i8"))
        self._paths = [folder / name for name in SPOOL]
        self._files = []
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        for path, kind, size in zip(self._paths, self._dtypes, sizes, strict=True):
            with storage_errors("write", path):
                if not size:
                    path.unlink(missing_ok=True)
                elif not path.exists() or path.stat().st_size < size * kind.itemsize:
                    raise DataError(
                        f"{path} has lost what was written to it; remove {folder} and begin again"
                    )
                file = os.fdopen(os.open(path, flags | (0 if size else os.O_CREAT | os.O_EXCL), 0o666), "ab")
                self._files.append(file)
                file.truncate(size * kind.itemsize)

    def add(self, ids: Ids, lengths: list[int], begins: bool) -> None:
        """Add documents, one after the other in `ids`; unless `begins`, the first continues another."""
        signed = np.array(lengths, "<i8")
        if not begins:
            signed[:1] = ~signed[:1]
        for at, array in enumerate((ids.astype(self._dtypes[0], copy=False), signed)):
            with storage_errors("write", self._paths[at]):
                self._files[at].write(array.data)
            self._sizes[at] += array.size

    def flush(self) -> list[int]:
        """Put everything on the disk. Return the sizes of the files."""
        for file, path in zip(self._files, self._paths, strict=True):
            with storage_errors("write", path):
                file.flush()
                os.fsync(file.fileno())
        with storage_errors("write to", self._folder):
            sync_directory(self._folder)
        return list(self._sizes)

    def index(self, seed: int | None) -> tuple[Array, Array, Array]:
        """Return the first position and the number of ids of each document, and an order of the documents.

        Each has a random key of the seed and its number. Without a seed they stay in the order of reading.
        """
        signed = np.empty(self._sizes[1], "<i8")
        self._read(1, signed, 0)
        first = np.flatnonzero(signed >= 0)
        ends = np.append(0, np.cumsum(np.where(signed < 0, ~signed, signed)))
        starts = ends[first]
        numbers = np.arange(len(first), dtype=np.uint64)
        order = numbers if seed is None else np.argsort(seeded_hashes(seed, numbers), kind="stable")
        return starts, np.diff(starts, append=ends[-1]), order

    def read_ids(self, out: Ids, places: list[int], starts: list[int], lengths: list[int]) -> None:
        """out[place : place + length] ← the ids from `start` on, for each of these."""
        for place, start, length in zip(places, starts, lengths, strict=True):
            self._read(0, out[place : place + length], start)

    def _read(self, which: int, out: Array, start: int) -> None:
        with storage_errors("read", path := self._paths[which]):
            descriptor = self._files[which].fileno()
            if not read_at(descriptor, out.view(np.uint8).data, start * out.itemsize):
                raise DataError(f"{path} has been cut short")

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):  # of what has not been written
                file.close()

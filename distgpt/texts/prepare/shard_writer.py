"""Writes a shard: a file of ids that has its name only when it is complete and on the disk."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from distgpt.core.base.files import new_file, storage_errors, sync_directory, unfinished
from distgpt.core.data.tokenizers import Ids
from distgpt.texts.shards import Shard, Split, file_bytes, header


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

    def finish(self, split: Split) -> Shard:
        """Write the file to the disk, under its name, and hash the bytes that can be read back."""
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

"""Which files hold documents, and how to read them: by the ending of their names."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from distgpt.errors import DataError
from distgpt.storage import storage_errors

TEXT, LINES, ROWS = "text", "lines", "rows"  # one document · one per line of JSON · one per row of a table
# What is taken from folders; a file that is named itself is a text unless its ending says otherwise.
ENDINGS = {
    ".txt": TEXT,
    ".md": TEXT,
    ".txt.gz": TEXT,
    ".jsonl": LINES,
    ".jsonl.gz": LINES,
    ".parquet": ROWS,
}
_SIP = 1 << 12  # bytes


@dataclass(frozen=True, slots=True)
class Input:
    """One file. `name` is its path below the folder that was given, so that it is the same elsewhere."""

    path: Path
    name: str
    kind: str
    bytes: int
    mtime_ns: int


def find_inputs(paths: Sequence[Path]) -> list[Input]:
    """These files, and in the place of a folder the files of known kinds below it, sorted."""
    found = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is no readable file and no folder")
        if path.is_dir():
            inside = [_described(file, file.relative_to(path).as_posix()) for file in _files(path)]
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
            found += inside
        else:
            found.append(_described(path, path.name))
    return found


def _files(folder: Path) -> list[Path]:
    """Hidden files and folders are left out."""
    with storage_errors("read", folder):
        below = [path for path in folder.rglob("*") if _known_kind(path.name) and path.is_file()]
    visible = [path for path in below if not any(p.startswith(".") for p in path.relative_to(folder).parts)]
    return sorted(visible, key=lambda path: path.parts)


def _known_kind(name: str) -> str | None:
    return next((kind for ending, kind in ENDINGS.items() if name.lower().endswith(ending)), None)


def _described(path: Path, name: str) -> Input:
    with storage_errors("read", path):
        about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{path} is no regular file; save what comes from a pipe first")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name of the file {str(path)!r} is not valid UTF-8") from None
    return Input(path, name, _known_kind(path.name) or TEXT, about.st_size, about.st_mtime_ns)


class _Sips:
    """Given out in small parts, so that a decompressor is never far ahead of what it has given out itself."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek = file.seek

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, _SIP))


class Stream:
    """The bytes of a file, uncompressed; `consumed` says how far the file itself has been read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._file = file
        compressed = path.name.lower().endswith(".gz")
        unzipped = gzip.GzipFile(fileobj=cast(BinaryIO, _Sips(file)), mode="rb") if compressed else file
        self._bytes = cast(BinaryIO, unzipped)
        self.read, self.readline, self.seek = self._bytes.read, self._bytes.readline, self._bytes.seek

    def consumed(self) -> int:
        return self._file.tell()


@contextmanager
def opened(source: Input) -> Iterator[Stream]:
    """What cannot be read, or uncompressed, is said in one line."""
    with storage_errors("read", source.path), source.path.open("rb") as file:
        try:
            yield Stream(source.path, file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} is damaged, or not gzip: {error}") from None

"""Which files hold documents, and how to read them: by the ending of their names."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from distgpt.errors import DataError, StorageError
from distgpt.files import storage_errors

TEXT, LINES, ROWS = "text", "lines", "rows"  # one document · one per line of JSON · one per row of a table
# What is taken from folders; a file given by name is a text unless its ending says otherwise.
ENDINGS = {
    ".txt": TEXT,
    ".md": TEXT,
    ".txt.gz": TEXT,
    ".jsonl": LINES,
    ".jsonl.gz": LINES,
    ".parquet": ROWS,
}
# What may be given by mistake, and what to do about it.
_PACKED = (".tar", ".tar.gz", ".tgz", ".zip", ".7z", ".zst", ".xz", ".bz2", ".parquet.gz")
_BINARY = (".npy", ".npz", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pdf")
NO_INPUTS = {
    **dict.fromkeys(_PACKED, "unpack it first"),
    **dict.fromkeys(_BINARY, "files of this kind are no texts"),
    **dict.fromkeys((".json", ".json.gz"), "save one object per line, under a name that ends in .jsonl"),
}
_SMALL = 1 << 12  # bytes


@dataclass(frozen=True, slots=True)
class Input:
    """One file. `name` is its path below the folder that was given, which is the same on other machines."""

    path: Path
    name: str
    kind: str
    bytes: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        return self.path.name.lower().endswith(".gz")


def find_inputs(paths: Sequence[Path]) -> list[Input]:
    """List these files and, for a folder, the files of known kinds below it, sorted."""
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
            if advice := _by_ending(NO_INPUTS, path.name):
                raise DataError(f"{path} is not read, by the ending of its name: {advice}")
            found.append(_described(path, path.name))
    for source in found:
        _refuse_binary(source)
    return found


def _files(folder: Path) -> list[Path]:
    """All files but hidden ones. Links are followed, each folder is entered once."""
    found = []
    seen = set()
    for place, folders, files in os.walk(folder, onerror=_refuse_unreadable, followlinks=True):
        with storage_errors("read", Path(place)):
            about = Path(place).stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if _by_ending(ENDINGS, path.name)), key=lambda path: path.parts)


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error


def _by_ending(table: dict[str, str], name: str) -> str | None:
    return next((entry for ending, entry in table.items() if name.lower().endswith(ending)), None)


def _described(path: Path, name: str) -> Input:
    with storage_errors("read", path):
        about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"{path} is no regular file; save what comes from a pipe first")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name of the file {str(path)!r} is not valid UTF-8") from None
    return Input(path, name, _by_ending(ENDINGS, path.name) or TEXT, about.st_size, about.st_mtime_ns)


def _refuse_binary(source: Input) -> None:
    """Look at the beginning of a text, before any work is done."""
    if source.kind == TEXT:
        with opened(source) as stream:
            if b"\0" in stream.read(_SMALL):
                raise DataError(f"{source.path} is no text in UTF-8: there are zero bytes in it")


class _SmallReads:
    """Reads in small parts, so that a decompressor never reads far ahead of its output."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek = file.seek

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, _SMALL))


class Stream:
    """The bytes of a file, uncompressed; `consumed` says how far the file itself has been read."""

    def __init__(self, source: Input, file: BinaryIO) -> None:
        self._file = file
        compressed = cast(BinaryIO, _SmallReads(file))
        unzipped = gzip.GzipFile(fileobj=compressed, mode="rb") if source.compressed else file
        self._bytes = cast(BinaryIO, unzipped)
        self.read, self.readline, self.seek = self._bytes.read, self._bytes.readline, self._bytes.seek

    def consumed(self) -> int:
        return self._file.tell()


@contextmanager
def opened(source: Input) -> Iterator[Stream]:
    """Open a file for reading; failures to read or decompress it become one line."""
    with storage_errors("read", source.path), source.path.open("rb") as file:
        try:
            yield Stream(source, file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} is damaged, or not gzip: {error}") from None

"""The files that hold documents: given by name, found in folders, or kept from standard input."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from distgpt.errors import DataError, StorageError
from distgpt.files import open_regular, storage_errors

TEXT, LINES, ROWS = "text", "lines", "rows"  # one document · one per line of JSON · one per row of a table
# What is taken from folders; a file given by name is a text unless its ending says otherwise.
ENDINGS = {".txt": TEXT, ".md": TEXT, ".txt.gz": TEXT, ".jsonl": LINES, ".jsonl.gz": LINES, ".parquet": ROWS}
# What may be given by mistake, and what to do about it.
_PACKED = (".tar", ".tar.gz", ".tgz", ".zip", ".7z", ".zst", ".xz", ".bz2", ".parquet.gz")
_BINARY = (".npy", ".npz", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pdf")
NO_INPUTS = {
    **dict.fromkeys(_PACKED, "unpack it first"),
    **dict.fromkeys(_BINARY, "files of this kind are no texts"),
    **dict.fromkeys((".json", ".json.gz"), "save one object per line, under a name that ends in .jsonl"),
}
_SMALL = 1 << 12  # bytes that show what a file is
_FOLDER = next(filter(Path.is_dir, map(Path, ("/proc/self/fd", "/dev/fd"))), Path("/dev/fd"))  # of open files


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


def find_inputs(paths: Sequence[Path | Input]) -> list[Input]:
    """List these files and, for a folder, the files of known kinds below it, sorted."""
    found = []
    for path in paths:
        if isinstance(path, Input):
            found.append(path)
        elif not path.exists():
            raise DataError(f"{path} is no readable file and no folder")
        elif path.is_dir():
            inside = [_described(file, file.relative_to(path).as_posix()) for file in _files(path)]
            if not inside:
                raise DataError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
            found += inside
        else:
            if advice := _by_ending(NO_INPUTS, path.name):
                raise DataError(f"{path} is not read, by the ending of its name: {advice}")
            found.append(_described(path, path.name))
    for source in found:  # before any work is done
        if source.kind == TEXT:
            with opened(source) as (stream, _):
                if b"\0" in stream.read(_SMALL):
                    raise DataError(f"{source.path} is no text in UTF-8: there are zero bytes in it")
    return found


def _files(folder: Path) -> list[Path]:
    """All files but hidden ones. Links are followed, each folder is entered once."""

    def refuse(error: OSError) -> NoReturn:
        raise StorageError(f"cannot read {error.filename}: {error.strerror}") from error

    found = []
    seen = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        with storage_errors("read", Path(parent)):
            about = Path(parent).stat()
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted((path for path in found if _by_ending(ENDINGS, path.name)), key=lambda path: path.parts)


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


class _SmallReads:
    """Reads in small parts, so that a decompressor never reads far ahead of its output."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek = file.seek

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, _SMALL))


@contextmanager
def opened(source: Input, offset: int = 0) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of a file, uncompressed, from an offset on, and the file itself; failures become one line."""
    with storage_errors("read", source.path), open_regular(source.path) as file:
        stream = gzip.GzipFile(fileobj=cast(BinaryIO, _SmallReads(file))) if source.compressed else file
        try:
            stream.seek(offset)
            yield cast(BinaryIO, stream), file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} is damaged, or not gzip: {error}") from None


@contextmanager
def piped(stream: BinaryIO) -> Iterator[Input]:
    """Everything that comes from there: lines of JSON if the first one begins so, else a text.

    The file has no name, so that nothing is left however the process ends. The input's time is always the
    same: the same text from another pipe resumes what was interrupted.
    """
    with ExitStack() as stack:
        with storage_errors("keep standard input in", Path(tempfile.gettempdir())):
            file = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, file)
            size = file.tell()
            file.seek(0)
            first = file.read(_SMALL)
        if b"\0" in first:
            raise DataError("standard input is no text in UTF-8: there are zero bytes in it")
        is_json = first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
        name, kind = ("stdin.jsonl", LINES) if is_json else ("stdin.txt", TEXT)
        yield Input(_FOLDER / str(file.fileno()), name, kind, size, mtime_ns=0)

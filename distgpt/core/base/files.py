"""File access: atomic writes, bounded reads, locks, and one-line errors."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from distgpt.core.base.checked import LARGEST_JSON
from distgpt.core.base.errors import DataError, Say, StorageError, nearest_path
from distgpt.core.base.formatting import size

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LONGEST_LINE = 1 << 16  # bytes of a line to append
DIRECT = 4 << 20  # bytes per direct write


def system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an error, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Convert any OSError into a one-line error with the action, the path and the reason."""
    try:
        yield
    except OSError as error:
        is_missing = action == "read" and isinstance(error, FileNotFoundError)
        meant = nearest_path(path) if is_missing else ""
        raise StorageError(f"cannot {action} {path}: {error.strerror or error}{meant}") from error


def bundled(kind: str, name: str) -> Path:
    """Return the path of a bundled file; `kind` is "data", "weights" or "docs"."""
    package = Path(__file__).resolve().parents[2]  # the directory distgpt
    for folder in (package / "bundled", package.parent):  # installed; a source checkout
        if (path := folder / kind / name).exists():
            return path
    raise DataError(f"the bundled {kind}/{name} is missing from this installation; reinstall distgpt")


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems cannot sync a directory.
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> bool | None:
    """Lock an open file until it is closed. Return False if another process has it, None if unsupported."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Network disks may not support locks.
        return None
    return True


def locked(descriptor: int, path: Path, say: Say) -> bool:
    """Lock a file. Return False if another process has locked it; warn if its disk does not support locks."""
    if (got := lock(descriptor, fcntl.LOCK_EX)) is None:
        say(without_locks(path))
    return got is not False


def without_locks(path: Path) -> str:
    return f"the file system of {path} has no locks; another process that writes there may go unnoticed"


def unfinished(path: Path) -> Path:
    """Return an unpredictable hidden name in the same directory for a file that is being written."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def unfinished_versions(path: Path) -> list[Path]:
    """List the temporary files that killed processes left for a path. No process may be writing it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    return [other for other in path.parent.iterdir() if pattern.fullmatch(other.name)]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` only when it is complete and synced to disk."""
    partial = unfinished(path)
    with storage_errors("write", path):
        try:
            with partial.open("xb") as file:  # Exclusive mode does not follow another user's link.
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def write_json(path: Path, content: object) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


class Direct:
    """A writer that bypasses the page cache if the disk supports it.

    Training leaves little memory, and filling the page cache takes longer than the disk. The last partial
    block is written through the page cache.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._is_direct = self._set(getattr(os, "O_DIRECT", 0))
        self._buffer = mmap.mmap(-1, DIRECT)  # page-aligned, as O_DIRECT requires
        self._filled = 0

    def write(self, content: ReadableBuffer) -> None:
        view = memoryview(content)
        while view:
            room = min(DIRECT - self._filled, len(view))
            self._buffer[self._filled : self._filled + room] = view[:room]
            self._filled += room
            view = view[room:]
            if self._filled == DIRECT:
                self._empty()

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._set(0)
            self._empty()
        self._buffer.close()

    def _set(self, flag: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags | flag)
        except OSError:
            return False
        return bool(flag)

    def _empty(self) -> None:
        with memoryview(self._buffer) as view:
            done = 0
            while done < self._filled:
                try:
                    done += os.write(self._descriptor, view[done : self._filled])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._is_direct:
                        raise
                    self._is_direct = self._set(0)
        self._filled = 0


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without blocking. Reject pipes and devices, which may never end."""
    if "\0" in str(path):
        raise DataError(f"cannot read {str(path)!r}: the name contains a NUL byte")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(_regular(descriptor, path), "rb")


def append(path: Path, content: bytes) -> None:
    """Append lines to a file, all or none. Create the file if necessary; do not follow a link.

    Drop an incomplete last line, which a killed process has left.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = _regular(os.open(path, flags, 0o666), path)
    same = os.dup(descriptor)  # stays open if closing fails; `path` may be replaced
    end: int | None = None
    try:
        with os.fdopen(descriptor, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                start = max(0, end - LONGEST_LINE)
                end = start + os.pread(file.fileno(), end - start, start).rfind(b"\n") + 1
                file.truncate(end)
            while content:
                content = content[file.write(content) :]
    except BaseException:  # Network disks may report a full disk only on close.
        if end is not None:
            with suppress(OSError):
                os.ftruncate(same, end)
        raise
    finally:
        os.close(same)


def _regular(descriptor: int, path: Path) -> int:
    """Return the descriptor of a regular file; otherwise close it and raise a DataError."""
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise DataError(f"{path} is {kind}, not a regular file")
    return descriptor


def read_small(path: Path, limit: int = LARGEST_JSON) -> bytes:
    """Read a whole file up to a limit. Disk errors become one line."""
    content = bytearray()
    with storage_errors("read", path), open_regular(path) as file:
        # Read in pieces, because one bounded read would allocate the whole limit.
        while len(content) <= limit and (piece := file.read(1 << 20)):
            content += piece
    if len(content) > limit:
        known = "; the largest known tokenizers have 35 MB" if limit == LARGEST_JSON else ""
        raise DataError(f"{path} is larger than {size(limit)}, the limit for these files{known}")
    return bytes(content)

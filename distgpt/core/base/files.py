"""Files: written whole or not at all, read with bounds, private caches, an OSError as one line."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from distgpt.core.base.checked import LARGEST
from distgpt.core.base.errors import DataError, Say, StorageError
from distgpt.core.base.formatting import size

FULL = (errno.ENOSPC, errno.EDQUOT)  # a quota that is used up counts as a full disk
LONGEST_LINE = 1 << 16  # bytes of a line that we append
DIRECT = 4 << 20  # bytes that go to the disk at once
PATIENCE, POLL = 120.0, 0.005  # seconds that a process waits for another one's result, and between two looks


def system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that an error was made of, if it was."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn any OSError inside into one line that says which action failed on which path, and why."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action} {path}: {error.strerror or error}") from error


def bundled(kind: str, name: str) -> Path:
    """Return the path of what comes with distgpt; `kind` is "data", "weights" or "docs"."""
    package = Path(__file__).resolve().parents[2]  # the folder distgpt
    for folder in (package / "bundled", package.parent):  # installed; a source checkout
        if (path := folder / kind / name).exists():
            return path
    raise DataError(f"the bundled {kind}/{name} is missing from this installation; install distgpt again")


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory, and say so
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> bool | None:
    """Lock an open file until it is closed. Return False if another process has, None without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # network disks may be mounted without
        return None
    return True


def locked(descriptor: int, path: Path, say: Say) -> bool:
    """Return False if another process has locked the file; lock it, or say that its disk has no locks."""
    if (got := lock(descriptor, fcntl.LOCK_EX)) is None:
        say(without_locks(path))
    return got is not False


def without_locks(path: Path) -> str:
    return f"the disk of {path} has no locks: another process that writes there too may not be noticed"


def new_file(path: Path) -> BinaryIO:
    """Create a file for writing that was not there: never one that a link planted by somebody points to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def allocate(file: BinaryIO, n_bytes: int) -> None:
    """Give a new file this many bytes of the disk: promised to it, or zeros where none are promised."""
    try:
        os.posix_fallocate(file.fileno(), 0, n_bytes)
    except (AttributeError, OSError) as error:  # not on macOS; not on every network's disk
        if getattr(error, "errno", None) in FULL:
            raise
        zeros = bytes(min(n_bytes, DIRECT))
        for start in range(0, n_bytes, DIRECT):
            file.write(zeros[: n_bytes - start])
        file.flush()
    os.fsync(file.fileno())  # a network's disk counts what it gets


def unfinished(path: Path) -> Path:
    """A name for the new version of a file while it is written: hidden, beside it, not to be guessed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def unfinished_versions(path: Path) -> list[Path]:
    """List what killed writers of this file left. Nobody may be writing it."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    return [other for other in path.parent.iterdir() if pattern.fullmatch(other.name)]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` only once it is complete and on the disk."""
    partial = unfinished(path)
    with storage_errors("write", path):
        try:
            with new_file(partial) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


class Direct:
    """Writes to a new file past the page cache, where that can be: its memory is scarce in a training run,
    and filling it costs more than the disk. What is left at the end goes the ordinary way."""

    def __init__(self, file: BinaryIO) -> None:
        self._descriptor = file.fileno()
        self._flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._is_direct = self._set(getattr(os, "O_DIRECT", 0))
        self._buffer = mmap.mmap(-1, DIRECT)  # aligned, as direct writing asks for
        self._filled = 0

    def write(self, content: Any) -> None:
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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


def cache_folder(name: str, beside: Path | None = None) -> Path | None:
    """A private folder for what can be made again: in `beside`, the user's cache or temporary folder."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    own = [Path(user, "distgpt"), Path(tempfile.gettempdir(), f"distgpt-{os.geteuid()}")]
    for parent in [beside, *own] if beside else own:
        safe = _is_open_to_few(parent) if parent == beside else _is_private(parent)
        if safe and _is_private(parent / name):
            return parent / name
    return None


def made_once(path: Path | None, make: Callable[[], bytes]) -> bytes:
    """Read a cache's file behind its checksum; damaged or missing, it is made, and kept if possible.

    Machine code is kept so: damaged, it would be run. Without a path nothing is kept.
    """
    if path and (kept := read_checked(path)) is not None:
        return kept
    return _kept(path, make())


def _kept(path: Path | None, made: bytes) -> bytes:
    """Keep what was made, if possible."""
    with suppress(StorageError):
        if path:
            write_checked(path, made)
    return made


def made_by_one(
    path: Path | None, make: Callable[[], bytes], accepts: Callable[[bytes], bool] = lambda kept: True
) -> bytes:
    """As `made_once`, if what is kept `accepts`; of processes that lack it one makes it, others wait."""
    if path is None:
        return make()
    if (kept := read_checked(path)) is not None and accepts(kept):
        return kept
    with _alone(path):
        if (kept := read_checked(path)) is not None and accepts(kept):
            return kept
        return _kept(path, make())


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one in after the other, by a lock beside the file that dies with its process.

    Where there can be no lock, or whoever has it is stuck, all go in: they only do the same work twice.
    """
    beside = path.with_name(f".{path.name}.lock")
    descriptor = None
    with suppress(OSError):
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if descriptor is None:
        yield
        return
    try:
        end = time.monotonic() + PATIENCE
        while (got := lock(descriptor, fcntl.LOCK_EX)) is False and time.monotonic() < end:
            time.sleep(POLL)
        yield
        if got is not False:
            # Whoever waits at the name that is gone gets its lock next, and finds the file.
            with suppress(OSError):
                beside.unlink()
    finally:
        lock(descriptor, fcntl.LOCK_UN)  # which closing it would not do while a forked child has it
        os.close(descriptor)


def read_checked(path: Path) -> bytes | None:
    """Return what `write_checked` wrote; None if it is missing or damaged."""
    with suppress(DataError, StorageError):
        if sha256((content := read_small(path))[32:]).digest() == content[:32]:
            return content[32:]
    return None


def write_checked(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(sha256(content).digest() + content)


def read_trusted(path: Path, owners: Collection[int]) -> bytes | None:
    """Return a file's content if it and its folder are of these users, and nobody else may write there."""
    with suppress(OSError, DataError), open_regular(path) as file:
        for found in (path.parent.stat(), os.fstat(file.fileno())):
            if found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        return file.read()
    return None


def _is_private(folder: Path) -> bool:
    """Return if the folder is there, made if need be, and only this user may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(found.st_mode) and private and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_open_to_few(folder: Path) -> bool:
    """Return if not everybody may rename what is in the folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError:
        return False
    return not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; refuse pipes and devices, which may never end, without waiting for them."""
    if "\0" in str(path):
        raise DataError(f"{str(path)!r} cannot be read: no file's name has a NUL byte in it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(_regular(descriptor, path), "rb")


def append(path: Path, content: bytes) -> None:
    """Write lines behind those of a file, all of them or nothing; made if need be; a link is not followed.

    A half line that a killed process has left there goes.
    """
    how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = _regular(os.open(path, how, 0o666), path)
    same = os.dup(descriptor)  # another process may put another file in its place
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
    except BaseException:  # also of closing, which is when a network's disk may say that it is full
        if end is not None:
            with suppress(OSError):
                os.ftruncate(same, end)
        raise
    finally:
        os.close(same)


def _regular(descriptor: int, path: Path) -> int:
    """An open file as it is, if it is a regular one."""
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise DataError(f"{path} is {what}, no regular file")
    return descriptor


def read_small(path: Path, limit: int = LARGEST) -> bytes:
    """All of a file that is read at once, up to a limit; failures of the disk become one line."""
    content = bytearray()
    with storage_errors("read", path), open_regular(path) as file:
        # Piece by piece: reading up to a limit would allocate that much.
        while len(content) <= limit and (piece := file.read(1 << 20)):
            content += piece
    if len(content) > limit:
        known = "; the largest tokenizers known have 35 MB" if limit == LARGEST else ""
        raise DataError(f"{path} is larger than {size(limit)}, too large for a file of its kind{known}")
    return bytes(content)

"""Private caches: files that can be made again, in folders that only this user may write to."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.base.files import atomic_file, lock, open_regular, read_small

PATIENCE, POLL = 120.0, 0.005  # seconds that a process waits for another one's result, and between two looks


def cache_folder(name: str, beside: Path | None = None) -> Path | None:
    """Return a private folder in `beside`, the user's cache or temporary folder; None if none is private."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    own = [Path(user, "distgpt"), Path(tempfile.gettempdir(), f"distgpt-{os.geteuid()}")]
    for parent in [beside, *own] if beside else own:
        safe = _is_open_to_few(parent) if parent == beside else _is_private(parent)
        if safe and _is_private(parent / name):
            return parent / name
    return None


def made_once(path: Path | None, make: Callable[[], bytes]) -> bytes:
    """Read a cache's file and verify its checksum; where it is damaged or missing, make and keep its content.

    The content may be machine code, which would be run though damaged. Without a path nothing is kept.
    """
    if path and (kept := read_checked(path)) is not None:
        return kept
    return _kept(path, make())


def _kept(path: Path | None, made: bytes) -> bytes:
    """Return what was made, and write it to the cache if possible."""
    with suppress(StorageError):
        if path:
            write_checked(path, made)
    return made


def made_by_one(
    path: Path | None, make: Callable[[], bytes], accepts: Callable[[bytes], bool] = lambda kept: True
) -> bytes:
    """As `made_once`, for content that `accepts` lets through. One process makes it, others wait for it."""
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
    """Let one process in after the other, by a lock beside the file, which ends with its process.

    Without locks, or if the one inside is stuck, all go in: they only do the same work twice.
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
    """Create the folder if need be; return whether only this user may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(found.st_mode) and private and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_open_to_few(folder: Path) -> bool:
    """Create the folder if need be; return whether not everybody may rename the files in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError:
        return False
    return not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)

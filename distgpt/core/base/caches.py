"""Private caches: files that can be recreated, in directories that only this user can write to."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.base.files import atomic_file, lock, open_regular
from distgpt.core.base.formatting import parse_size

CACHE = "DISTGPT_CACHE"  # the directory of all caches; default: the usual places
LIMIT = "DISTGPT_CACHE_SIZE"  # maximum bytes of compiled code, all versions together
USUAL_LIMIT, MOST_FILES = 256 << 20, 2000  # quotas also limit the number of files
OURS = re.compile(r"loops-[0-9a-f]{16}(-.*)?|kernels")
# A user's own directory may be called kernels, so only these files in it belong to distgpt.
KERNEL = re.compile(r".+\.(cubin|choice)(\.lock|\.[0-9a-f]{12}\.tmp)?")

PATIENCE = 120.0  # seconds to wait for another process's result
POLL, LONGEST_POLL = 0.005, 0.05  # seconds between two checks; the interval grows
DAY = 86400.0  # seconds: the precision of a file's last use


def requested_folder() -> Path | None:
    """Return the directory in DISTGPT_CACHE with variables expanded, such as /scratch/$USER/distgpt."""
    given = os.path.expanduser(os.path.expandvars(os.environ.get(CACHE, "")))  # noqa: PTH111
    return Path(given).absolute() if given else None


def temporary_folder() -> Path | None:
    """Return the fallback directory on a local disk, private or not; None if none is writable."""
    with suppress(FileNotFoundError):
        return Path(tempfile.gettempdir(), f"distgpt-{os.geteuid()}")
    return None


def usual_folder() -> Path:
    """Return the user's cache directory for when DISTGPT_CACHE is not set."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    return user.absolute() / "distgpt"


def cache_folder(name: str, beside: Path | None = None) -> Path | None:
    """Return a private directory, or None if none is available.

    Try DISTGPT_CACHE, or if it is not set, `beside` and the user's cache. Then try the temporary directory.
    """
    asked = requested_folder() or beside
    for parent in places(beside):
        _create(parent)
        safe = _is_closed(parent) if parent == asked else _is_private(parent)
        if safe and _is_private(_create(parent / name)):
            return parent / name
    return None


def places(beside: Path | None = None) -> list[Path]:
    """List the possible parent directories of caches, in order of preference."""
    if asked := requested_folder():
        is_known = "$" not in asked.as_posix()  # an unset variable would become part of the name
        return [*filter(None, [asked if is_known else None, temporary_folder()])]
    return [*filter(None, [beside, usual_folder(), temporary_folder()])]


def own_folders(name: str, beside: Path | None = None) -> list[Path]:
    """List the directories of this name that are safe to read. Compute nodes may mount home read-only."""
    return [parent / name for parent in places(beside) if _is_own(parent / name) and _is_closed(parent)]


def misplaced(found: Path) -> str:
    """Return a warning if a directory is not inside DISTGPT_CACHE, otherwise ""."""
    asked = requested_folder()
    if asked is None or asked in found.parents:
        return ""
    return f"{CACHE} is {asked}, which other users can change; using {found.parent}"


def cache_limit() -> int:
    """Return the maximum number of bytes of compiled code."""
    try:
        return parse_size(given) if (given := os.environ.get(LIMIT)) else USUAL_LIMIT
    except UsageError as error:
        raise UsageError(f"{LIMIT}: {error}") from None


def compute_once(
    path: Path | None, make: Callable[[], bytes], accepts: Callable[[bytes], bool] = lambda kept: True
) -> bytes:
    """Return the content of a cache file. If it is missing, corrupt or not accepted, make and keep it.

    One process makes it while others wait. The content may be machine code, so a checksum protects it. If
    `path` is None, keep nothing.
    """
    if path is None:
        return make()
    if (kept := read_checked(path)) is not None and accepts(kept):
        return kept
    with alone(path) as not_kept:
        if (kept := read_checked(path)) is not None and accepts(kept):
            return kept
        made = make()
        try:
            keep(path, made)
        except StorageError:
            not_kept()
        return made


@contextmanager
def alone(path: Path) -> Iterator[Callable[[], None]]:
    """Admit one process at a time, by a lock that ends with its process; yield `not_kept`.

    Waiting processes also enter as soon as the file appears. If the process inside is stuck or calls
    `not_kept`, all enter, because each has to make the content itself.
    """
    result = _opened(path)
    if result is None:
        yield lambda: None
        return
    descriptor, name, got = result
    try:
        before, end, pause = _stamp(path), time.monotonic() + PATIENCE, POLL
        while not got and _stamp(path) == before and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL)
            got = bool(lock(descriptor, fcntl.LOCK_EX))
        if got and not os.fstat(descriptor).st_mtime:  # marked by `not_kept`
            with suppress(OSError):
                name.unlink()
            lock(descriptor, fcntl.LOCK_UN)
            got = False
        yield partial(_mark, descriptor)
    finally:
        if got:
            # A process waiting on the removed lock file gets its lock next and finds the file.
            with suppress(OSError):
                name.unlink()
        lock(descriptor, fcntl.LOCK_UN)  # Closing does not unlock if a forked child has the file open.
        os.close(descriptor)


def _mark(descriptor: int) -> None:
    """Mark a lock so that waiting processes stop waiting. This works even on a full disk."""
    with suppress(OSError):  # Without the mark, the others wait for each other.
        os.utime(descriptor, (0, 0))


def _opened(path: Path) -> tuple[int, Path, bool] | None:
    """Open a lock file for `path`. Return its descriptor, its name, and whether this process has the lock.

    None if the disk is full or does not support locks.
    """
    name = path.with_name(f".{path.name}.lock")
    with suppress(OSError):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if (got := lock(descriptor, fcntl.LOCK_EX)) is not None:
            return descriptor, name, got
        os.close(descriptor)
        name.unlink()
    return None


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return values that change when the file is rewritten; None if it does not exist."""
    with suppress(OSError):
        result = path.stat()
        return result.st_ino, result.st_ctime_ns
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a cache file. If the cache exceeds its limits, remove the least recently used files."""
    with suppress(OSError):  # Another process may have emptied the cache.
        path.parent.mkdir(mode=0o700)
    write_checked(path, content)
    _trim(path.parent, cache_limit())


def is_compiled(folder: Path) -> bool:
    """Return whether a directory is for compiled code, not a user's own."""
    return OURS.fullmatch(folder.name) is not None


def compiled_files(folder: Path) -> list[Path]:
    """List the files that distgpt wrote to a directory of compiled code."""
    is_shared = folder.name == "kernels"
    return [path for path in folder.iterdir() if not is_shared or KERNEL.fullmatch(path.name)]


def _trim(current: Path, limit: int) -> None:
    """Remove the oldest files of compiled code; the current directory's files are last."""
    with suppress(OSError):
        folders = [folder for folder in current.parent.iterdir() if is_compiled(folder)]
        paths = [path for folder in folders for path in compiled_files(folder)]
        result = [(path.parent == current, (at := path.lstat()).st_mtime, at.st_size, path) for path in paths]
        excess = sum(size for _, _, size, _ in result) - limit
        for number, (_, _, size, path) in enumerate(sorted(result)):
            if excess <= 0 and len(result) - number <= MOST_FILES:
                break
            path.unlink(missing_ok=True)
            excess -= size


def note_use(path: Path) -> None:
    """Set a file's or directory's time to now, because file systems may not record reads (noatime)."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def read_checked(path: Path) -> bytes | None:
    """Return a checked file's content, which may be code; None if it is corrupt or another user's."""
    with suppress(OSError, DataError), open_regular(path) as file:
        is_own = os.fstat(file.fileno()).st_uid == os.geteuid()
        if is_own and sha256((content := file.read())[32:]).digest() == content[:32]:
            note_use(path)
            return content[32:]
    return None


def write_checked(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(sha256(content).digest() + content)


def read_trusted(path: Path, owners: Collection[int]) -> bytes | None:
    """Return a file's content if only these users can write to it and its directory; otherwise None."""
    with suppress(OSError, DataError), open_regular(path) as file:
        for result in (path.parent.stat(), os.fstat(file.fileno())):
            if result.st_uid not in owners or result.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        return file.read()
    return None


def _create(folder: Path) -> Path:
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _is_private(folder: Path) -> bool:
    return _is_own(folder) and os.access(folder, os.W_OK | os.X_OK)


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        result = folder.lstat()
        alone = result.st_uid == os.geteuid() and not result.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(result.st_mode) and alone
    return False


def _is_closed(folder: Path) -> bool:
    """Return whether only root and this user can rename the files in a directory."""
    with suppress(OSError):
        result = folder.stat()
        is_closed = not result.st_mode & stat.S_IWOTH or bool(result.st_mode & stat.S_ISVTX)
        return is_closed and result.st_uid in (0, os.geteuid())  # the owner can rename the files in it
    return False

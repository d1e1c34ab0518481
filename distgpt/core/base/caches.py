"""Private caches: files that can be made again, in folders that only this user may write to."""

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

CACHE = "DISTGPT_CACHE"  # the folder for all caches; without it each lies where it is usual
LIMIT = "DISTGPT_CACHE_SIZE"  # bytes of what is compiled, of all versions
USUAL_LIMIT, MOST_FILES = 256 << 20, 2000  # quotas count files, too
OURS = re.compile(r"loops-[0-9a-f]{16}(-.*)?|kernels")
# A folder that a user calls kernels may have been there before: in it only these are ours.
KERNEL = re.compile(r".+\.(cubin|choice)(\.lock|\.[0-9a-f]{12}\.tmp)?")

PATIENCE = 120.0  # seconds that a process waits for another one's result
POLL, LONGEST_POLL = 0.005, 0.05  # seconds between two looks, the longer the longer it waits
DAY = 86400.0  # seconds; a file's time is that of its last use, to this precision


def requested_folder() -> Path | None:
    """Return the folder that DISTGPT_CACHE names; variables in it count, as in /scratch/$USER/distgpt."""
    given = os.path.expanduser(os.path.expandvars(os.environ.get(CACHE, "")))  # noqa: PTH111
    return Path(given).absolute() if given else None


def temporary_folder() -> Path | None:
    """Return the folder of last resort, on a disk of this node, private or not; None if none is writable."""
    with suppress(FileNotFoundError):
        return Path(tempfile.gettempdir(), f"distgpt-{os.geteuid()}")
    return None


def usual_folder() -> Path:
    """Return the user's folder where DISTGPT_CACHE names none."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    return user.absolute() / "distgpt"


def cache_folder(name: str, beside: Path | None = None) -> Path | None:
    """Return a private folder: in DISTGPT_CACHE; if that is not set, in `beside` or the user's cache.

    Else in the temporary folder; None if that is not private either.
    """
    asked = requested_folder() or beside
    for parent in places(beside):
        _create(parent)
        safe = _is_closed(parent) if parent == asked else _is_private(parent)
        if safe and _is_private(_create(parent / name)):
            return parent / name
    return None


def places(beside: Path | None = None) -> list[Path]:
    """List where caches may lie, in the order of preference."""
    if asked := requested_folder():
        is_known = "$" not in asked.as_posix()  # a variable that is not set would be a folder's name
        return [*filter(None, [asked if is_known else None, temporary_folder()])]
    return [*filter(None, [beside, usual_folder(), temporary_folder()])]


def own_folders(name: str, beside: Path | None = None) -> list[Path]:
    """List the folders of this name that are safe to read: a home may be mounted read-only where jobs run."""
    return [parent / name for parent in places(beside) if _is_own(parent / name) and _is_closed(parent)]


def misplaced(found: Path) -> str:
    """Describe that a folder is not where DISTGPT_CACHE asks for it; "" if it is, or if that is not set."""
    asked = requested_folder()
    if asked is None or asked in found.parents:
        return ""
    return f"{CACHE} is {asked}, which is not this user's alone: {found.parent} is used"


def cache_limit() -> int:
    """Return how many bytes may be kept of what is compiled."""
    try:
        return parse_size(given) if (given := os.environ.get(LIMIT)) else USUAL_LIMIT
    except UsageError as error:
        raise UsageError(f"{LIMIT}: {error}") from None


def made_by_one(
    path: Path | None, make: Callable[[], bytes], accepts: Callable[[bytes], bool] = lambda kept: True
) -> bytes:
    """Read a cache's file; where none is right and `accepts` takes it, make and keep its content.

    One process makes it, others wait for it. The content may be machine code, which would be run though
    damaged: so it has a checksum. Without a path nothing is kept.
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
    """Let one process in after the other, by a lock, which ends with its process; yield `not_kept`.

    Those that wait also get in as soon as the file appears. They all do if the one inside is stuck, and after
    one that calls `not_kept`, since each has to make the content for itself then.
    """
    found = _opened(path)
    if found is None:
        yield lambda: None
        return
    descriptor, name, got = found
    try:
        before, end, pause = _stamp(path), time.monotonic() + PATIENCE, POLL
        while not got and _stamp(path) == before and time.monotonic() < end:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL)
            got = bool(lock(descriptor, fcntl.LOCK_EX))
        if got and not os.fstat(descriptor).st_mtime:  # marked
            with suppress(OSError):
                name.unlink()
            lock(descriptor, fcntl.LOCK_UN)
            got = False
        yield partial(_mark, descriptor)
    finally:
        if got:
            # Whoever waits at the name that is gone gets its lock next, and finds the file.
            with suppress(OSError):
                name.unlink()
        lock(descriptor, fcntl.LOCK_UN)  # which closing it would not do while a forked child has it
        os.close(descriptor)


def _mark(descriptor: int) -> None:
    """Mark a lock as that of what cannot be kept, which a full disk has room for."""
    with suppress(OSError):  # of a disk that fails otherwise: the others wait in turn
        os.utime(descriptor, (0, 0))


def _opened(path: Path) -> tuple[int, Path, bool] | None:
    """Open a file beside `path` for a lock. Return it, its name, and if this process has the lock now.

    None where the disk is full or has no locks.
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
    """Return what changes when the file is written anew; None if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a file of a cache. If all is more than the limits, remove what was not used for longest."""
    with suppress(OSError):  # where another process has emptied the cache
        path.parent.mkdir(mode=0o700)
    write_checked(path, content)
    _trim(path.parent, cache_limit())


def is_compiled(folder: Path) -> bool:
    """Return whether this name is that of a folder of something compiled; others may have folders beside."""
    return OURS.fullmatch(folder.name) is not None


def compiled_files(folder: Path) -> list[Path]:
    """List what distgpt has written to a folder of something compiled."""
    is_shared = folder.name == "kernels"
    return [path for path in folder.iterdir() if not is_shared or KERNEL.fullmatch(path.name)]


def _trim(current: Path, limit: int) -> None:
    """Remove the oldest files of what is compiled, those in the current folder last."""
    with suppress(OSError):
        folders = [folder for folder in current.parent.iterdir() if is_compiled(folder)]
        paths = [path for folder in folders for path in compiled_files(folder)]
        found = [(path.parent == current, (at := path.lstat()).st_mtime, at.st_size, path) for path in paths]
        excess = sum(size for _, _, size, _ in found) - limit
        for number, (_, _, size, path) in enumerate(sorted(found)):
            if excess <= 0 and len(found) - number <= MOST_FILES:
                break
            path.unlink(missing_ok=True)
            excess -= size


def note_use(path: Path) -> None:
    """Make the time of a file or folder that of its last use: file systems may not note it (noatime)."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def read_checked(path: Path) -> bytes | None:
    """Return what `write_checked` wrote, which may be code; None if it is damaged or another user's."""
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
    """Return a file's content if it and its folder are of these users, and nobody else may write there."""
    with suppress(OSError, DataError), open_regular(path) as file:
        for found in (path.parent.stat(), os.fstat(file.fileno())):
            if found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        return file.read()
    return None


def _create(folder: Path) -> Path:
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Return whether this user may write to a folder, and nobody else."""
    return _is_own(folder) and os.access(folder, os.W_OK | os.X_OK)


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        found = folder.lstat()
        alone = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(found.st_mode) and alone
    return False


def _is_closed(folder: Path) -> bool:
    """Return whether few may rename the files in a folder."""
    with suppress(OSError):
        found = folder.stat()
        is_closed = not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX)
        return is_closed and found.st_uid in (0, os.geteuid())  # its owner may rename what is in it
    return False

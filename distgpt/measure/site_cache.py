"""Write the site's compiled loops, for all users of this installation (disk_cache.py reads them).

Whoever may change the package fills the cache, by `distgpt compile`.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distgpt.core.base.errors import StorageError
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.cpu.compiling import disk_cache
from distgpt.measure.doctor.facts import site_files


def require_writable() -> None:
    """Make the folder, for all to read. Refuse one that this user may not write to."""
    folder, package = disk_cache.SITE, disk_cache.PACKAGE
    try:
        if os.geteuid() not in {0, package.stat().st_uid}:  # others would not trust its files
            raise StorageError(f"cannot write {folder}: {package} belongs to another user")
        with storage_errors("write", folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
    except StorageError as error:
        raise StorageError(f"{error}: whoever owns {package} fills the cache of its users") from None


def share() -> Path:
    """Move all that this process has used to the site's cache, too. Return the file that holds it now.

    Of commands that run at once one after the other does so, each with what the former have moved.
    """
    with _alone():
        disk_cache.site.cache_clear()  # it may be of before another one's turn
        return _share(disk_cache.used)


@contextmanager
def _alone() -> Iterator[None]:
    descriptor = os.open(disk_cache.SITE, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _share(used: set[str]) -> Path:
    files = {name: content for name in sorted(used) if (content := disk_cache.read(name)) is not None}
    if files.keys() != used:
        raise StorageError(f"compiled loops cannot be kept in {disk_cache.folder()}: is the disk full?")
    files = {**disk_cache.site(), **files}
    path = _write(files)
    if disk_cache.site().keys() != files.keys():
        raise StorageError(f"{path} was not read back whole, or others may write to its folder")
    if own := disk_cache.folder():
        for name in files:
            (own / name).unlink(missing_ok=True)
    return path


def _write(files: dict[str, bytes]) -> Path:
    """Write the file, for all to read, and remove those of other versions for this kind of processor."""
    path, content = disk_cache.site_path(), pickle.dumps(files)
    with atomic_file(path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(disk_cache.site_digest(path, content) + content)
    for other in site_files():
        if other != path:
            other.unlink(missing_ok=True)
    disk_cache.site.cache_clear()  # it holds what the file was before
    return path

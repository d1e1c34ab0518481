"""The lock of a run directory, in which only one process at a time may train."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from distgpt.core.base.checked import checked, parse_object
from distgpt.core.base.errors import DataError, StorageError, UsageError, escape
from distgpt.core.base.files import lock, open_regular, read_small, storage_errors
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm

# Attempts to lock a file. A process that checks the lock also holds it for a moment.
ATTEMPTS = 10
SECONDS_BETWEEN = 0.05

_held: dict[Path, RunLock] = {}  # locks held by this process, or about to be


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of running.json: the process that trains here."""

    host: str
    pid: int

    def __str__(self) -> str:
        return escape(f"process {self.pid} on {self.host}")[:200]


class RunLock:
    """The kernel's lock on running.json, which ends with the process. The file names its holder.

    If a network disk does not support locks, only the name counts, if that process is alive on this host.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "running.json"
        self._directory = directory
        self._absolute = self.path.absolute()  # a notebook may change directory while it holds the lock
        self._descriptor: int | None = None  # file descriptor of running.json while it is locked
        self._is_lost = False  # whether this process is a fork of the holder

    @contextmanager
    def claimed(self, comm: Comm) -> Iterator[None]:
        """Hold the directory in rank 0's process during the context. Collective."""
        on_root(comm, self.claim)
        try:
            yield
        finally:
            if comm.rank == 0:
                self.release()

    def claim(self) -> None:
        """Hold the directory until `release` or the end of the process. A forked child does not hold it.

        Raise a UsageError if another process or another run of this process holds it.
        """
        if self._descriptor is not None:
            return
        if _held.setdefault(self._absolute, self) is not self:
            raise self._in_use()
        try:
            with storage_errors("write", self._absolute):
                for _ in range(ATTEMPTS):
                    if self._lock():
                        return
                    time.sleep(SECONDS_BETWEEN)
        finally:
            if self._descriptor is None:
                _held.pop(self._absolute, None)
        raise self._in_use()

    def _lock(self) -> bool:
        """Try to lock the file. Return whether this process now holds it."""
        path = self._absolute
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        got = lock(descriptor, fcntl.LOCK_EX)
        is_free = not self._is_named() if got is None else got
        # The holder may have removed the file between `open` and `lock`, so that this one has no name.
        if not is_free or not _is_at(descriptor, path):
            os.close(descriptor)
            return False
        self._descriptor, self._is_lost = descriptor, False
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(asdict(Holder(platform.node(), os.getpid()))).encode() + b"\n")
        except OSError:
            self.release()
            raise
        if got is None:  # If two processes start at the same time, the name written last wins.
            time.sleep(SECONDS_BETWEEN)
            if self._is_named():
                self._descriptor = None
                os.close(descriptor)
                return False
        return True

    def release(self) -> None:
        """Release the directory if this process holds it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        _held.pop(self._absolute, None)
        with suppress(OSError):
            if _is_at(descriptor, self._absolute):
                self._absolute.unlink()
        with suppress(OSError):  # the lock is released even if closing reports an error
            os.close(descriptor)

    def refuse_taken(self) -> None:
        """Raise a UsageError if another process has taken over the claimed directory.

        A process that considers this host lost removes the locked file.
        """
        if self._is_lost:
            raise self._in_use()
        if self._descriptor is None:
            return
        with storage_errors("read", self._absolute):  # a temporary disk error ends no run
            if self._absolute.exists() and not _is_at(self._descriptor, self._absolute):
                raise self._in_use()

    def refuse_second(self) -> str:
        """Raise a UsageError if another run holds the directory. Return the process killed here, or ""."""
        if self._descriptor is not None:
            return ""
        if self.is_held():
            raise self._in_use()
        return str(self.holder() or "another process") if self._absolute.exists() else ""

    def is_held(self) -> bool:
        """Return whether a process trains here."""
        if self._absolute in _held:
            return True
        with storage_errors("read", self.path):
            try:
                with open_regular(self._absolute) as file:
                    got = lock(file.fileno(), fcntl.LOCK_SH)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return self._is_named() if got is None else not got

    def lacks_locks(self) -> bool:
        """Return whether the directory is held only by name, because the disk does not support locks."""
        return self._descriptor is not None and lock(self._descriptor, fcntl.LOCK_EX) is None

    def _in_use(self) -> UsageError:
        return UsageError(
            f"{self._directory} is in use by {self.holder() or 'another process'}; "
            "wait until it ends, stop it, or choose another --out"
        )

    def _is_named(self) -> bool:
        """Return whether running.json names another live process on this host."""
        holder = self.holder()
        if holder is None or holder.host != platform.node():
            return False
        if holder.pid <= 0 or holder.pid == os.getpid():  # 0 and negative ids are process groups
            return False
        try:
            os.kill(holder.pid, 0)  # signal 0 only checks
        except PermissionError:  # the process is another user's
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return True

    def holder(self) -> Holder | None:
        """Return the process that running.json names; None if the file is incomplete."""
        with suppress(DataError, StorageError, ValueError):
            result = parse_object(read_small(self._absolute), self.path)
            return checked(Holder, {name: result.get(name) for name in Holder.__slots__})
        return None


def _let_go() -> None:
    """In a forked child, leave the locks to the parent."""
    for held in _held.values():
        if held._descriptor is not None:
            os.close(held._descriptor)
        held._descriptor, held._is_lost = None, True
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at this path."""
    try:
        return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        # A file removed by another host is stale on NFS. Either may also vanish after the first check.
        if error.errno in (errno.ESTALE, errno.ENOENT):
            return False
        raise

"""The lock of a run's directory: one process at a time trains there."""

from __future__ import annotations

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

ATTEMPTS, SECONDS_BETWEEN = 10, 0.05  # to lock a file that another process may be looking at

_held: dict[Path, int] = {}  # open files that this process has locked


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of running.json: the process that trains here."""

    host: str
    pid: int

    def __str__(self) -> str:
        return escape(f"process {self.pid} on {self.host}")[:200]


class RunLock:
    """The kernel's lock on running.json, which ends with the process, and the name of its holder in there."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "running.json"
        self._directory, self._absolute = directory, self.path.absolute()

    @contextmanager
    def claimed(self, comm: Comm) -> Iterator[None]:
        """Hold the directory meanwhile, in rank 0's process. Collective."""
        on_root(comm, self.claim)
        try:
            yield
        finally:
            if comm.rank == 0:
                self.release()

    def claim(self) -> None:
        """Hold the directory until `release`, or the end of the process; a UsageError if another one does."""
        path = self._absolute
        with storage_errors("write", path):
            for _ in range(ATTEMPTS):
                if path in _held or self._lock(path):
                    return
                time.sleep(SECONDS_BETWEEN)
        raise self._in_use()

    def _lock(self, path: Path) -> bool:
        """Lock the file, and return whether this process holds it now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        got = lock(descriptor, fcntl.LOCK_EX)
        is_free = got if got is not None else not self._is_named()
        if not is_free or not _is_at(descriptor, path):  # its holder has removed it meanwhile
            os.close(descriptor)
            return False
        _held[path] = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(asdict(Holder(platform.node(), os.getpid()))).encode() + b"\n")
        except OSError:
            self.release()
            raise
        if got is None:
            time.sleep(SECONDS_BETWEEN)
            if self._is_named():  # another process began at the same moment, and wrote its name later
                os.close(_held.pop(path))
                return False
        return True

    def release(self) -> None:
        """Release the directory, if this process holds it."""
        path = self._absolute
        if (descriptor := _held.pop(path, None)) is not None:
            with suppress(OSError):
                if _is_at(descriptor, path):
                    path.unlink()
            with suppress(OSError):  # the lock is gone even where closing reports an error
                os.close(descriptor)

    def refuse_second(self) -> str:
        """Raise a UsageError if another process holds the directory; return which one was killed here."""
        if self._absolute in _held:
            return ""
        if self.is_held():
            raise self._in_use()
        return str(self._holder() or "another process") if self._absolute.exists() else ""

    def is_held(self) -> bool:
        """Return whether a process trains here."""
        if self._absolute in _held:
            return True
        with storage_errors("read", self.path):
            try:
                with open_regular(self._absolute) as file:
                    got = lock(file.fileno(), fcntl.LOCK_SH)
                    return self._is_named() if got is None else not got
            except (FileNotFoundError, NotADirectoryError):
                return False

    def lacks_locks(self) -> bool:
        """Return whether this process holds the directory by its name alone."""
        return self._absolute in _held and lock(_held[self._absolute], fcntl.LOCK_EX) is None

    def _is_named(self) -> bool:
        """Return whether running.json names another process of this host that lives.

        On a disk without locks that is all that can be known.
        """
        holder = self._holder()
        return holder is not None and holder.host == platform.node() and _is_another(holder.pid)

    def _in_use(self) -> UsageError:
        return UsageError(
            f"{self._directory} is in use: {self._holder() or 'another process'} trains there; "
            "wait for its end, stop it, or choose another --out"
        )

    def _holder(self) -> Holder | None:
        """Return the process that wrote its name into running.json; None where the file is half written."""
        with suppress(DataError, StorageError, ValueError):
            found = parse_object(read_small(self._absolute), self.path)
            return checked(Holder, {name: found.get(name) for name in Holder.__slots__})
        return None


def _is_another(pid: int) -> bool:
    """Return whether a process of this number runs, and is not this one."""
    if pid <= 0 or pid == os.getpid():  # 0 and below are groups
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at this path."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())

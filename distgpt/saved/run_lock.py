"""Which process trains in a run's directory: `running.json`, which is there only as long as it does.

A second process is refused. A killed one leaves the file behind, and the next one takes over. Numbers of
processes are used again, so one counts only together with the moment at which it started and with the boot
and the PID namespace in which it has that number. Whether one lives that cannot be seen from here, as on
another host, its file tells: a living one touches it every few seconds.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from distgpt.checked import Count, read_as
from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.comm.cores import boot_id
from distgpt.errors import DataError, StorageError, UsageError
from distgpt.files import new_file, read_small, storage_errors

SECONDS_BEAT, SECONDS_DEAD = 10.0, 60.0
ATTEMPTS = 3
_beating: dict[Path, threading.Event] = {}
_lost: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Holder:
    """A process. `space` is where its number is valid, `started` are clock ticks; "" and 0 if unknown."""

    host: str
    space: str
    pid: Count
    started: Count


def myself() -> Holder:
    return Holder(platform.node(), _space(), os.getpid(), _started(os.getpid()) or 0)


@contextmanager
def run_lock(path: Path, comm: Comm) -> Iterator[None]:
    """Rank 0's process is named in the file at `path` meanwhile. Collective."""
    path = path.absolute()
    on_root(comm, lambda: claim(path))
    try:
        yield
    finally:
        if comm.rank == 0:
            release(path)


def claim(path: Path) -> None:
    """Name this process in the file until `run_lock` ends; a UsageError if another one lives there."""
    own, path = myself(), path.absolute()
    with storage_errors("write", path):
        for _ in range(ATTEMPTS):
            there = path.exists()
            if (dead := refuse_second(path)) == own:
                break
            if there:
                _remove(path, dead)
            _put_there(path, own)
        else:
            raise UsageError(f"{path} keeps coming and going: another process begins there now")
    if not _beating:
        atexit.register(_release_all)
    _lost.discard(path)
    if path not in _beating:
        _beating[path] = stop = threading.Event()
        threading.Thread(target=_beat, args=(path, stop), daemon=True).start()


def _put_there(path: Path, own: Holder) -> None:
    """The whole file at once, unless there is one."""
    made = _aside(path)
    try:
        with new_file(made) as file:
            file.write(json.dumps(asdict(own)).encode() + b"\n")
        try:
            path.hardlink_to(made)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            if not path.exists():
                made.rename(path)
    finally:
        made.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _remove(path: Path, dead: Holder | None) -> None:
    """The file of one that has ended, unless another one has put its own there meanwhile."""
    aside = _aside(path)
    with suppress(FileNotFoundError):
        path.rename(aside)
        found = None
        with suppress(DataError, StorageError):
            found = read_holder(aside)
        if found is None or found == dead:
            aside.unlink()
        elif not path.exists():
            aside.rename(path)


def refuse_second(path: Path) -> Holder | None:
    """Return the process named there: this one, or one that ended. Refuse another that lives."""
    try:
        holder = read_holder(path)
    except DataError:  # damaged, or on its way
        holder = None
    if holder != myself() and lives(holder, path):
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        raise UsageError(
            f"{path.parent} is in use: {who} trains there; wait for its end, stop it, or choose another --out"
        )
    return holder


def lives(holder: Holder | None, path: Path) -> bool:
    """Return if the process still trains there, by the age of its file if it cannot be seen from here."""
    alive = None if holder is None else is_alive(holder)
    if alive is not None:
        return alive
    with suppress(FileNotFoundError, NotADirectoryError):
        return time.time() - path.stat().st_mtime < SECONDS_DEAD
    return False


def _beat(path: Path, stop: threading.Event) -> None:
    while not stop.wait(SECONDS_BEAT):
        with suppress(OSError, DataError, StorageError):
            if read_holder(path) not in (None, myself()):
                _lost.add(path)
                return
            os.utime(path)


def is_lost(path: Path) -> bool:
    """Return if another process took this one for dead, and its place."""
    return path.absolute() in _lost


def _release_all() -> None:
    """Release the places of a process that ends before it trains."""
    for path in list(_beating):
        release(path)


def release(path: Path) -> None:
    """Give the place free, if it is this process's."""
    path = path.absolute()
    if stop := _beating.pop(path, None):
        stop.set()
    with suppress(OSError, DataError, StorageError):
        if read_holder(path) == myself():
            path.unlink()


def read_holder(path: Path) -> Holder | None:
    """The process that is named there; None if there is no such file."""
    if not path.exists():
        return None
    return cast(Holder, read_as(Holder, read_small(path), path))


def is_alive(holder: Holder) -> bool | None:
    """Return whether the process still runs; None where that cannot be seen from here."""
    if (holder.host, holder.space) != (platform.node(), _space()):
        return None
    if holder.space:
        return _started(holder.pid) == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _space() -> str:
    """The boot and the PID namespace, if the system has names for them."""
    with suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the boot; None if it is gone."""
    try:
        # Behind the name, which may hold anything: the state is the first field, the start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

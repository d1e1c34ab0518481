"""Which process trains in a run's directory: `running.json`, which is there only as long as it does.

A killed process leaves it behind. Numbers of processes are used again, so one counts only together with the
moment at which it started and with the boot and the PID namespace in which it has that number.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.comm.cores import boot_id
from distgpt.errors import DataError
from distgpt.files import atomic_file, parse_object, read_small


@dataclass(frozen=True, slots=True)
class Holder:
    """A process. `space` is where its number is valid, `started` are clock ticks; "" and 0 if unknown."""

    host: str
    space: str
    pid: int
    started: int


def myself() -> Holder:
    return Holder(platform.node(), _space(), os.getpid(), _started(os.getpid()) or 0)


@contextmanager
def held(path: Path, comm: Comm) -> Iterator[None]:
    """Rank 0's process is named in the file at `path` meanwhile. Collective."""
    own = myself()
    on_root(comm, lambda: _write(path, own))
    try:
        yield
    finally:
        if comm.rank == 0:
            with suppress(OSError, DataError):
                if read_holder(path) == own:
                    path.unlink()


def read_holder(path: Path) -> Holder | None:
    """The process that is named there; None if there is no such file."""
    if not path.exists():
        return None
    found = parse_object(read_small(path), path)
    try:
        holder = Holder(**found)
    except TypeError:
        raise DataError(f"{path} names no process") from None
    texts, numbers = (holder.host, holder.space), (holder.pid, holder.started)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_count, numbers)):
        raise DataError(f"{path} names no process")
    return holder


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


def _write(path: Path, own: Holder) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(asdict(own)).encode() + b"\n")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _space() -> str:
    """The boot and the PID namespace, if the system has names for them."""
    with suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None if it is gone."""
    try:
        # Behind the name, which may hold anything: the state is the first field, the start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

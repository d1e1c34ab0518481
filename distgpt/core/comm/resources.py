"""The cores and the memory that this process may use: those of the machine, and the limit that grants fewer.

Limits are those of control groups, of both versions and with all groups above, of the process (ulimit), and
what a batch system grants (`Grants`).
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distgpt.core.base.formatting import size
from distgpt.core.base.system import sysctl_number
from distgpt.core.components import components

MIB = 1 << 20
ADDRESSES = 256 * MIB  # that fill no memory: malloc's arenas, stacks, libraries and code still to be loaded
CACHES = ("active", "inactive")  # of files: memory that a group gives up when it needs more
ULIMITS = {"v": (resource.RLIMIT_AS, "VmSize"), "d": (resource.RLIMIT_DATA, "VmData")}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one of some processes can have, and the limit that leaves no more."""

    free: int
    total: int = 0  # of the limit, for all processes under it; 0 without one
    limit: str = ""  # its name; "" if the machine itself has no more
    ranks: int = 1

    @property
    def where(self) -> str:
        """Describe whose memory this is, as in "this machine, limited to 1.5 GiB by ulimit -v"."""
        each = f" for each of {self.ranks} ranks" if self.ranks > 1 else ""
        limited = f", limited to {size(self.total)} by {self.limit}" if self.limit else ""
        return f"this machine{each}{limited}"


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores, or their worth of time, of one of some processes, and the limit that grants no more."""

    number: float
    limit: str = ""  # its name; "" for the cores that it may run on

    @property
    def whole(self) -> int:
        return max(1, int(self.number + 1e-6))


@dataclass(frozen=True, slots=True)
class Groups:
    """The control groups of this process, by the files in which the system tells of them."""

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def chain(self, controller: str) -> Iterator[tuple[str, Path]]:
        """Yield name and folder of the group that a controller puts this process in, and of all above.

        A container may see its own group as the root, below which those of its path are missing.
        """
        for _, controllers, inside in (line.split(":", 2) for line in _read(self.own).splitlines()):
            if controllers == "":  # version 2, whose place beside version 1 is unified/
                roots = [self.root, self.root / "unified"]
            else:
                roots = [self.root / controller] if controller in controllers.split(",") else []
            for root in roots:
                for place in (group := root / inside.lstrip("/"), *group.parents):
                    if place.is_relative_to(root):
                        yield str(place).removeprefix(str(root)) or "/", place


class Grants:
    """The grants of a batch system to its job, beside what the system enforces. Here none is known."""

    def memory(self) -> Iterable[tuple[int, str]]:
        """Return bytes for all ranks of this host, and the name of each limit."""
        return ()

    def cores(self, ranks: int) -> Iterable[tuple[float, str]]:
        """Return cores for each of some ranks of this host, and the name of each limit."""
        return ()


UNKNOWN = Grants()


def granted_memory(ranks: int = 1, groups: Groups = Groups(), grants: Grants | None = None) -> Memory:
    """Return what each of some ranks on this machine can have, by the limit that leaves the least."""
    found = [Memory(available_memory() // ranks)]
    for name, group in groups.chain("memory"):
        # memory.high counts: what goes beyond is slowed down until it stands. memory.soft_limit_in_bytes does
        # not.
        for limit, used in (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
        ):
            total, now = _read(group / limit), _read(group / used)
            if total.isdigit() and now.isdigit():
                rows = dict(row.split() for row in _read(group / "memory.stat").splitlines())
                # Version 1 has sums over all groups below under names of their own.
                caches = (rows.get(f"total_{kind}_file", rows.get(f"{kind}_file", 0)) for kind in CACHES)
                free = int(total) - max(0, int(now) - sum(map(int, caches)))
                limit_of_group = f"{limit} of the control group {name}"
                found.append(Memory(max(0, free) // ranks, int(total), limit_of_group))
    for granted, by in (grants or components().grants()).memory():
        found.append(Memory(max(0, granted // ranks - status_bytes("VmRSS")), granted, by))
    for flag, (number, counted) in ULIMITS.items():  # which each rank has for itself
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            free = most - status_bytes(counted) - ADDRESSES
            found.append(Memory(max(0, free), most, f"ulimit -{flag}"))
    return replace(min(found, key=lambda memory: memory.free), ranks=ranks)


def granted_cores(
    share: float = 0.0, ranks: int = 1, groups: Groups = Groups(), grants: Grants | None = None
) -> Cores:
    """Return what each of some ranks on this machine can use of its `share` of cores; 0: of all of them."""
    found = [Cores(share or len(usable_cores()))]
    for name, group in groups.chain("cpu"):
        old = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        for file, text in (("cpu.cfs_quota_us", old), ("cpu.max", _read(group / "cpu.max"))):
            time, _, period = text.partition(" ")
            if time.isdigit() and period.isdigit():  # neither -1 nor max
                quota = int(time) / int(period)
                found.append(Cores(quota / ranks, f"{file} of the control group {name}"))
    granted = (grants or components().grants()).cores(ranks)
    found += [Cores(float(number), limit) for number, limit in granted]
    return min(found, key=lambda cores: cores.number)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# The machine and this process, as the system counts them


def usable_cores() -> set[int]:
    """Core numbers this process is bound to; all of them where the system does not say.

    On macOS the fast cores alone: parts of equal size would wait for the slow ones.
    """
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(sysctl_number("hw.perflevel0.logicalcpu") or os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes that new processes could have without limits; all of the machine's if the system says no more."""
    free = _kibibytes("/proc/meminfo", "MemAvailable")
    return (sysctl_number("hw.memsize") or 1 << 62) if free is None else free


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    # Not getrusage's, which may be those of the process that started this one.
    if most := status_bytes("VmHWM"):
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def status_bytes(name: str) -> int:
    """Bytes of this process by a name of /proc/self/status; 0 where the system does not say."""
    return _kibibytes("/proc/self/status", name) or 0


def _kibibytes(file: str, name: str) -> int | None:
    """Bytes by a name in a file of the system that counts in KiB; None where it does not say."""
    lines = _read(Path(file)).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)

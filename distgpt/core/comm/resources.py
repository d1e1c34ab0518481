"""The cores and memory that this process may use: the machine's, or less if a limit applies.

Limits come from control groups (v1 and v2, including parents), from ulimit, and from the batch system
(`Grants`).
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
ADDRESSES = 256 * MIB  # address space only: malloc arenas, stacks, libraries and code still to be loaded
CACHES = ("active", "inactive")  # file caches, which a group frees when it needs memory
ULIMITS = {"v": (resource.RLIMIT_AS, "VmSize"), "d": (resource.RLIMIT_DATA, "VmData")}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes available to each of `ranks` processes, and the limit that determines them."""

    free: int
    total: int = 0  # bytes of the limit, for all its processes; 0 without a limit
    limit: str = ""  # its name; "" if only the machine limits it
    ranks: int = 1

    @property
    def where(self) -> str:
        """Describe the memory, such as "this machine, limited to 1.5 GiB by ulimit -v"."""
        each = f" for each of {self.ranks} ranks" if self.ranks > 1 else ""
        limited = f", limited to {size(self.total)} by {self.limit}" if self.limit else ""
        return f"this machine{each}{limited}"


@dataclass(frozen=True, slots=True)
class Cores:
    """CPU cores, or CPU time in cores, for each of some processes, and the limit that determines them."""

    number: float
    limit: str = ""  # "" for the CPU affinity

    @property
    def whole(self) -> int:
        return max(1, int(self.number + 1e-6))


@dataclass(frozen=True, slots=True)
class Groups:
    """The control groups of this process, read from /proc and /sys."""

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def chain(self, controller: str) -> Iterator[tuple[str, Path]]:
        """Yield name and directory of this process's group in a controller, and of all parents.

        A container may see its own group as the root, without the groups in its path.
        """
        for _, controllers, inside in (line.split(":", 2) for line in _read(self.own).splitlines()):
            if controllers == "":  # version 2; next to version 1 it is in unified/
                roots = [self.root, self.root / "unified"]
            else:
                roots = [self.root / controller] if controller in controllers.split(",") else []
            for root in roots:
                for place in (group := root / inside.lstrip("/"), *group.parents):
                    if place.is_relative_to(root):
                        yield str(place).removeprefix(str(root)) or "/", place


class Grants:
    """Limits that a batch system sets for its job. This default has none."""

    def memory(self) -> Iterable[tuple[int, str]]:
        """Return bytes for all ranks of this host, and the name of each limit."""
        return ()

    def cores(self, ranks: int) -> Iterable[tuple[float, str]]:
        """Return cores for each of `ranks` ranks of this host, and the name of each limit."""
        return ()


UNKNOWN = Grants()


def granted_memory(ranks: int = 1, groups: Groups = Groups(), grants: Grants | None = None) -> Memory:
    """Return the memory available to each of `ranks` ranks on this machine, by the tightest limit."""
    result = [Memory(available_memory() // ranks)]
    for name, group in groups.chain("memory"):
        # memory.high counts because a process above it is throttled to a standstill.
        # memory.soft_limit_in_bytes does not count.
        for limit, used in (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
        ):
            total, now = _read(group / limit), _read(group / used)
            if total.isdigit() and now.isdigit():
                rows = dict(row.split() for row in _read(group / "memory.stat").splitlines())
                # Version 1 names sums over all child groups total_*.
                caches = (rows.get(f"total_{kind}_file", rows.get(f"{kind}_file", 0)) for kind in CACHES)
                free = int(total) - max(0, int(now) - sum(map(int, caches)))
                limit_of_group = f"{limit} of the control group {name}"
                result.append(Memory(max(0, free) // ranks, int(total), limit_of_group))
    for granted, by in (grants or components().grants()).memory():
        result.append(Memory(max(0, granted // ranks - status_bytes("VmRSS")), granted, by))
    for flag, (number, counted) in ULIMITS.items():  # each rank has its own ulimit
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            free = most - status_bytes(counted) - ADDRESSES
            result.append(Memory(max(0, free), most, f"ulimit -{flag}"))
    return replace(min(result, key=lambda memory: memory.free), ranks=ranks)


def granted_cores(
    share: float = 0.0, ranks: int = 1, groups: Groups = Groups(), grants: Grants | None = None
) -> Cores:
    """Return the cores available to each of `ranks` ranks. `share`: cores of this rank, 0 for all usable."""
    result = [Cores(share or len(usable_cores()))]
    for name, group in groups.chain("cpu"):
        old = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        for file, text in (("cpu.cfs_quota_us", old), ("cpu.max", _read(group / "cpu.max"))):
            time, _, period = text.partition(" ")
            if time.isdigit() and period.isdigit():  # neither -1 nor max
                quota = int(time) / int(period)
                result.append(Cores(quota / ranks, f"{file} of the control group {name}"))
    granted = (grants or components().grants()).cores(ranks)
    result += [Cores(float(number), limit) for number, limit in granted]
    return min(result, key=lambda cores: cores.number)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# The machine and this process, as the system counts them.


def usable_cores() -> set[int]:
    """Return the cores this process may run on; all if the system does not report them.

    On macOS, return only the performance cores, because equal parts would wait for the slow ones.
    """
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(sysctl_number("hw.perflevel0.logicalcpu") or os.cpu_count() or 1))


def available_memory() -> int:
    """Return the bytes available to new processes, ignoring limits; the machine's total if unknown."""
    free = _kibibytes("/proc/meminfo", "MemAvailable")
    return (sysctl_number("hw.memsize") or 1 << 62) if free is None else free


def peak_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    # Not getrusage, which may report the peak of the parent process.
    if most := status_bytes("VmHWM"):
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def status_bytes(name: str) -> int:
    """Return bytes from /proc/self/status; 0 if the system does not report them."""
    return _kibibytes("/proc/self/status", name) or 0


def _kibibytes(file: str, name: str) -> int | None:
    """Return bytes from a system file that counts in KiB; None if it does not have the name."""
    lines = _read(Path(file)).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)

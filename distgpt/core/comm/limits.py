"""The memory and the cores that the system grants this process, and the limit that decides.

Limits are those of control groups, of both versions and with all groups above, of the process (ulimit), and
what a batch system grants. cores.py has what the machine itself gives.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distgpt.core.base.formatting import size
from distgpt.core.comm.batch import Environ, systems
from distgpt.core.comm.cores import available_memory, status_bytes, usable_cores

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
        try:
            lines = self.own.read_text().splitlines()
        except OSError:
            return
        for _, controllers, inside in (line.split(":", 2) for line in lines):
            if controllers == "":  # version 2, whose place beside version 1 is unified/
                roots = [self.root, self.root / "unified"]
            else:
                roots = [self.root / controller] if controller in controllers.split(",") else []
            for root in roots:
                for place in (group := root / inside.lstrip("/"), *group.parents):
                    if place.is_relative_to(root):
                        yield str(place).removeprefix(str(root)) or "/", place


def granted_memory(ranks: int = 1, groups: Groups = Groups(), environ: Environ = os.environ) -> Memory:
    """Return what each of some ranks on this machine can have, by the limit that leaves the least."""
    shared = [Memory(available_memory()), *_of_groups(groups)]
    each = [replace(memory, free=max(0, memory.free) // ranks) for memory in shared]
    least = min([*each, *_of_systems(environ, ranks), *_of_process()], key=lambda memory: memory.free)
    return replace(least, ranks=ranks)


def _of_groups(groups: Groups) -> Iterator[Memory]:
    """Yield what is free of each group.

    memory.high counts: what goes beyond is slowed down until it stands. memory.soft_limit_in_bytes does not.
    """
    for name, group in groups.chain("memory"):
        for limit, used in (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
        ):
            most, now = _read(group / limit), _read(group / used)
            if most.isdigit() and now.isdigit():
                rows = dict(row.split() for row in _read(group / "memory.stat").splitlines())
                # Version 1 has sums over all groups below under names of their own.
                kinds = [rows.get(f"total_{kind}_file", rows.get(f"{kind}_file", 0)) for kind in CACHES]
                free = int(most) - max(0, int(now) - sum(map(int, kinds)))
                yield Memory(free, int(most), f"{limit} of the control group {name}")


def _of_systems(environ: Environ, ranks: int) -> Iterator[Memory]:
    """Yield what batch systems grant the ranks of this host together."""
    for system in systems(environ):
        for total, limit in system.memory(environ):
            yield Memory(max(0, total // ranks - status_bytes("VmRSS")), total, limit)


def _of_process() -> Iterator[Memory]:
    """Yield what the limits of the process itself leave: each rank has them for itself."""
    for flag, (number, used) in ULIMITS.items():
        most = resource.getrlimit(number)[0]
        if most != resource.RLIM_INFINITY:
            free = most - status_bytes(used) - ADDRESSES
            yield Memory(max(0, free), most, f"ulimit -{flag}")


def granted_cores(
    share: float = 0.0, ranks: int = 1, groups: Groups = Groups(), environ: Environ = os.environ
) -> Cores:
    """Return what each of some ranks on this machine can use of its `share` of cores; 0: of all of them."""
    quotas = [Cores(number / ranks, limit) for number, limit in _quotas(groups)]
    of_systems = (system.cores(environ) for system in systems(environ))
    granted = [Cores(float(number), limit) for number, limit in filter(None, of_systems)]
    return min([Cores(share or len(usable_cores())), *quotas, *granted], key=lambda cores: cores.number)


def _quotas(groups: Groups) -> Iterator[tuple[float, str]]:
    for name, group in groups.chain("cpu"):
        old = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        for file, text in (("cpu.cfs_quota_us", old), ("cpu.max", _read(group / "cpu.max"))):
            time, _, period = text.partition(" ")
            if time.isdigit() and period.isdigit():  # neither -1 nor max
                yield int(time) / int(period), f"{file} of the control group {name}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

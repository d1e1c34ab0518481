"""Which processor cores this process may run on, how much memory is left, and was taken."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from distgpt.system import sysctl_number, sysctl_text


def usable_cores() -> set[int]:
    """Core numbers this process is bound to; all of them where the system does not say.

    On macOS the fast cores alone: parts of equal size would wait for the slow ones.
    """
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(sysctl_number("hw.perflevel0.logicalcpu") or os.cpu_count() or 1))


def boot_id() -> str:
    """Return an id of this machine since it started; "" where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return sysctl_text("kern.bootsessionuuid")


def available_memory() -> int:
    """Bytes that new processes could have; all of the machine's where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sysctl_number("hw.memsize") or 1 << 62
    sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":") for line in lines)}
    limits = zip(cgroup("memory.max"), cgroup("memory.current"), strict=False)
    left = [int(most) - int(used) for most, used in limits if most.isdigit()]
    return min([sizes.get("MemAvailable", 1 << 62), *left])


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    try:  # not getrusage's, which may be those of the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10


def cgroup(
    file: str, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[str]:
    """Read a file of control groups (version 2) for this process's group and all above it."""
    try:
        inside = next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return []
    group = root / inside
    groups = [group, *(place for place in group.parents if place.is_relative_to(root))]
    return [(place / file).read_text().strip() for place in groups if (place / file).is_file()]

"""Which processor cores this process may run on, how much memory the machine has left, and was taken."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from distgpt.core.base.system import sysctl_number, sysctl_text


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
    """Bytes that new processes could have; all of the machine's where the system does not say.

    Without the limits of this process: limits.py.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sysctl_number("hw.memsize") or 1 << 62
    sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":") for line in lines)}
    return sizes.get("MemAvailable", 1 << 62)


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    # Not getrusage's, which may be those of the process that started this one.
    if most := status_bytes("VmHWM"):
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def status_bytes(name: str) -> int:
    """Bytes of this process by a name of /proc/self/status; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)

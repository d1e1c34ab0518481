"""Which processor cores this process may run on, and how much memory is left."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> set[int]:
    """Core numbers this process is bound to; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes that new processes could have; a very large number where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    sizes = {name: int(size.split()[0]) << 10 for name, size in (line.split(":") for line in lines)}
    return sizes.get("MemAvailable", 1 << 62)

"""Which processor cores this process may run on."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Core numbers this process is bound to; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))

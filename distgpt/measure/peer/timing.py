"""How every side of a comparison times its work and counts its memory; runs without distgpt too."""

from __future__ import annotations

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

PROBE = 64  # items, from whose time that of all is estimated


def timed(
    work: Callable[[int], float],
    items: int,
    repeats: int,
    patience: float,
    agreed: Callable[[float], float] = float,
) -> dict[str, Any]:
    """Seconds of each of some passes over the first n items, where work(n) does one and gives a result.

    A pass that would take longer than `patience` seconds is made over fewer items, `measured` of them, and
    there are as many passes, up to `repeats`, as fit into that time. One more to warm up is not counted.
    Where several processes do this together, `agreed` makes one number of what each has found.
    """
    probe = min(PROBE, items)
    work(probe)
    each = agreed(_seconds(work, probe)[0]) / probe
    measured = items if each * items <= patience else max(probe, int(patience / each))
    one_pass = each * measured
    passes = repeats if one_pass * repeats <= patience else max(1, int(patience / one_pass))
    if passes > 1:
        work(measured)
    timings = [_seconds(work, measured) for _ in range(passes)]
    seconds = [seconds for seconds, _ in timings]
    return {
        "measured": measured,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "loss": timings[-1][1],
    }


def _seconds(work: Callable[[int], float], items: int) -> tuple[float, float]:
    begun = time.perf_counter()
    result = work(items)
    return time.perf_counter() - begun, result


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of unmapping them: fewer page faults, a higher peak."""
    if sys.platform != "linux":
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)  # never: the largest size


def peak_memory() -> int:
    """The most bytes that this process has held."""
    try:  # not getrusage's, which may be those of the process that started this one
        with open("/proc/self/status") as file:  # noqa: PTH123
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10

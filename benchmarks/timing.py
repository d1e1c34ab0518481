"""Time passes over many items. Imports nothing: PyTorch as a peer is timed by the same lines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PROBE = 64  # items: their time is multiplied to estimate that of all


def timed(
    work: Callable[[int], float],
    items: int,
    repeats: int,
    patience: float,
    agreed: Callable[[float], float] = float,
) -> dict[str, Any]:
    """Time up to `repeats` passes of `work(n)` over the first n items, after one that warms up.

    If a pass over all items would take longer than `patience` seconds, it is made over fewer, `measured` of
    them; there are as many passes as fit into that time. Where several processes do this together, `agreed`
    makes one number of what each has measured.
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

"""Time passes over many items. PyTorch's environment also runs this file, so it imports nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PROBE = 64  # items; the total time is extrapolated


def timed(
    work: Callable[[int], float],
    items: int,
    repeats: int,
    patience: float,
    agreed: Callable[[float], float] = float,
) -> dict[str, Any]:
    """Time up to `repeats` passes of `work(n)` over the first n items, after a warm-up pass.

    If a pass over all items would take longer than `patience` seconds, use fewer items, `measured`, and
    as many passes as fit. `agreed` combines the measurements of multiple processes into one.
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

"""How a piece of work over N items is timed: the same rule for every contestant, in any process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PROBE = 64  # items that tell how long all will take


def timed(
    work: Callable[[int], float],
    items: int,
    repeats: int,
    patience: float,
    agreed: Callable[[float], float] = float,
) -> dict[str, Any]:
    """Seconds of each of some passes over the first n items, where work(n) does one and gives a result.

    A pass that would take longer than `patience` is made over fewer items, `measured` of them, and there are
    as many passes, up to `repeats`, as fit into that time. One more to warm up is not counted. Where several
    processes do this together, `agreed` gives one number to all of them for what each has found.
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

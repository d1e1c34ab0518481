"""Which rank keeps the others waiting: the last to come to the exchange, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from distgpt.units import count, duration

RECENT = 100  # steps


class Laggards:
    """Of the last steps."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def add(self, seconds: Sequence[float]) -> dict[str, float]:
        """From how long each rank took, none if unknown: who was last, and by how much, as metrics."""
        if not any(seconds):
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = [float(s) for rank, s in enumerate(seconds) if rank != slowest]
        self._last.append((slowest, float(seconds[slowest]) - fmean(others)))
        return {"slowest_rank": slowest, "late_s": self._last[-1][1]}

    def sentence(self) -> str:
        """For a reader; "" if nothing is known."""
        last = list(self._last)
        if not last:
            return ""
        ranks = [rank for rank, _ in last]
        most = max(set(ranks), key=ranks.count)
        late = fmean(seconds for rank, seconds in last if rank == most)
        steps = count(len(last), "step")
        return f"of the last {steps}, rank {most} was the slowest in {ranks.count(most)}, by {duration(late)}"

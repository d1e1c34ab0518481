"""Guard against a slow rank that keeps the others waiting: who comes last to the exchange, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from statistics import fmean

from distgpt.core.base.formatting import count, duration
from distgpt.core.train.progress import Finished

RECENT = 100  # steps


class Stragglers(AbstractContextManager["Stragglers"]):
    """Counts which rank was last to reach the exchange in recent steps."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def __exit__(self, *ended: object) -> None: ...

    def after_step(self, done: Finished) -> dict[str, float]:
        return self.add(done.rank_seconds)

    def add(self, seconds: Sequence[float]) -> dict[str, float]:
        """Take each rank's seconds, none if unknown. Return metrics: who was last, and how late."""
        if not any(seconds):
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = [float(s) for rank, s in enumerate(seconds) if rank != slowest]
        self._last.append((slowest, float(seconds[slowest]) - fmean(others)))
        return {"slowest_rank": slowest, "late_s": self._last[-1][1]}

    def sentence(self) -> str:
        """Return a sentence about the slowest rank, "" if nothing is known."""
        last = list(self._last)
        if not last:
            return ""
        ranks = [rank for rank, _ in last]
        most = max(set(ranks), key=ranks.count)
        late = fmean(seconds for rank, seconds in last if rank == most)
        steps = count(len(last), "step")
        return f"of the last {steps}, rank {most} was the slowest in {ranks.count(most)}, by {duration(late)}"

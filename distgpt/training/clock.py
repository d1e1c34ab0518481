"""The end of a run: after its steps, or when its time is over. All ranks go by the clock of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from distgpt.config import TrainConfig
from distgpt.training.progress import Pace

# The share of the time in which steps are taken: the last checkpoint and the weights are written in the rest.
KEPT = 0.985


def is_over(seconds: float, t: TrainConfig) -> bool:
    """Return whether the time of a run that ends by the clock is over after this many seconds of it."""
    return seconds >= KEPT * 60 * t.train_minutes


class Clock:
    """Says which step is the last one, and what fraction of the run's time has elapsed.

    Rank 0 sends with each step how much will be over at the end of the next one. So all ranks know, and take
    the same learning rate.
    """

    def __init__(
        self,
        t: TrainConfig,
        pace: Pace,
        begun: float,
        spent: float = 0.0,
        queued: bool = False,
        closing: float = 0.0,
        until: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begun`: the moment from which this process counts; `spent`: the seconds of those before it.

        `queued`: a step may be under way when the next one is launched. `closing`: the time after the last
        step that counts too, in steps. `until`: a step to end at before the last one, for the time being.
        """
        self._whole, self._pace, self._now = 60 * t.train_minutes, pace, now
        self._total = KEPT * self._whole
        self._begun, self._closing = begun - spent, closing
        self._ahead = 1 + 3 * queued  # steps that end until the one that goes by what `ahead` says
        self._round = pace.rounds.length
        self.elapsed = min(1.0, spent / self._total) if self._total else None
        self.last: int | None = t.steps if until is None else until  # None: not known yet
        if self._total:
            self.last = pace.progress.step if self.elapsed == 1 else None

    def seconds(self) -> float:
        """Return the run's seconds so far, all that it has after its last step; 0 without a clock."""
        is_over = self._pace.progress.step == self.last
        return self._whole if is_over else min(self._whole, self._now() - self._begun)

    def ahead(self) -> float:
        """Return the fraction of the time that is over with the next step: 1 if none fits after it."""
        if not self._total:
            return 0.0
        usual = self._pace.usual()
        end = self._now() - self._begun + self._ahead * usual
        total = max(self._total / 2, self._total - self._closing * usual)
        return 1.0 if end + usual > total else end / total

    def hear(self, elapsed: float, launched: int) -> None:
        """Go by what rank 0 has sent. The next step is the last one once the time is over."""
        if self.elapsed is None:
            return
        self.elapsed = min(1.0, elapsed)
        if self.elapsed == 1 and (self.last is None or self.last > launched + self._round):
            self.last = (launched // self._round + 1) * self._round

"""The clock of a run that ends when its time is over (--within). All ranks go by the clock of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable

from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.train.assessment import Validation
from distgpt.core.train.progress import Pace
from distgpt.core.train.seams import KEPT, Clock, Times

EVALUATION = 0.5  # of the time that a token takes in a step


class TimedClock(Clock):
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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begun`: the moment from which this process counts; `spent`: the seconds of those before it.

        `queued`: a step may be under way when the next one is launched. `closing`: the time after the last
        step that counts too, in steps.
        """
        self._whole, self._pace, self._now = 60 * t.train_minutes, pace, now
        self._total = KEPT * self._whole
        self._begun, self._closing = begun - spent, closing
        self._ahead = 1 + 3 * queued  # steps that end until the one that goes by what `elapsed_ahead` says
        self._round = pace.rounds.length
        elapsed = min(1.0, spent / self._total)
        super().__init__(pace.progress.step if elapsed == 1 else None, elapsed)

    def seconds(self) -> float:
        """Return the run's seconds so far, all that it has after its last step."""
        is_over = self._pace.progress.step == self.last
        return self._whole if is_over else min(self._whole, self._now() - self._begun)

    def elapsed_ahead(self) -> float:
        """Return the fraction of the time that is over with the next step: 1 if none fits after it."""
        usual = self._pace.usual()
        end = self._now() - self._begun + self._ahead * usual
        total = max(self._total / 2, self._total - self._closing * usual)
        return 1.0 if end + usual > total else end / total

    def hear_elapsed(self, elapsed: float, launched: int) -> None:
        """Go by what rank 0 has sent. The next step is the last one once the time is over."""
        self.elapsed = min(1.0, elapsed)
        if self.elapsed == 1 and (self.last is None or self.last > launched + self._round):
            self.last = (launched // self._round + 1) * self._round


def timed_clock(
    t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
) -> TimedClock:
    """Return the clock of a run, which leaves time for the evaluation after the last step."""
    per_step = t.batch_size * model.config.seq_len
    closing = EVALUATION * (validation.count if validation else 0) / per_step
    return TimedClock(t, pace, times.begun, times.spent, model.kernels.capabilities.is_async, closing)

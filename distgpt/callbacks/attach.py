"""Attach guards to a run, by its settings, and the smallest of them: late ranks, limits of time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from distgpt.callbacks.watchdog import Watchdog, save_and_exit
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.train.progress import Finished, Pace
from distgpt.core.train.run import Limits, Run
from distgpt.core.train.seams import KEPT, Clock, Guard, Times

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Validation


def callbacks_of(run: Run, limits: Limits) -> Sequence[Guard]:
    """Return what watches a run, by its settings and its limits."""
    pace, found = Pace(run.progress, run.placement.rounds), list[Guard]()
    if run.comm.size > 1:
        found.append(Stragglers())
    end_job = partial(save_and_exit, run)
    found.append(Watchdog(run.comm, run.activity, limits, pace.usual, run.report.note, end_job))
    if limits.end is not None and run.comm.rank == 0:  # the others hear of it by a step's votes
        found.append(Deadline(run, limits.end, pace))
    return found


class Stragglers(AbstractContextManager["Stragglers"]):
    """Adds to each step's metrics which rank was the last to reach the exchange, and how late."""

    def __exit__(self, *ended: object) -> None: ...

    def after_step(self, done: Finished) -> dict[str, float]:
        seconds = list(done.rank_seconds)
        if not any(seconds):  # not measured
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        last = float(seconds.pop(slowest))
        return {"slowest_rank": slowest, "late_s": last - fmean(seconds)}


STEPS, SAVES = 2.0, 1.5  # how much slower than the slowest recent one the last step and the last save may be
LEAVING = 2.0  # seconds: writing the summary, ending MPI
BYTES_PER_SECOND = 1e8  # of the disk, assumed until a checkpoint was written


def latest_step(
    end: float, step_seconds: Sequence[float], save_seconds: float | None, save_bytes: float, saves: int = 1
) -> float:
    """Return the moment after which no step should begin, so that a run has ended by the moment `end`.

    After the step `saves` checkpoints must still be written; `save_seconds` is None before the first one.
    """
    save = save_bytes / BYTES_PER_SECOND if save_seconds is None else save_seconds
    return end - LEAVING - saves * SAVES * save - STEPS * max(step_seconds, default=0.0)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A guard of rank 0: the run notes SIGUSR1 by itself when no further step fits before the limit."""

    run: Run
    end: float  # a moment of time.monotonic()
    pace: Pace

    def look_ahead(self) -> None:
        """Decide until when another step may begin."""
        run = self.run
        size = 4 * run.placement.saved_buffers(is_common=False) * run.model.layout.size
        saves = 2 if run.settings.save == "async" else 1
        recent, seconds = self.pace.recent(), run.checkpoints.seconds
        run.signals.deadline = latest_step(self.end, recent, seconds, size, saves)

    def after_step(self, done: Finished) -> dict[str, float]:
        self.look_ahead()
        return {}

    def __enter__(self) -> None:
        self.look_ahead()

    def __exit__(self, kind: object, ended: BaseException | None, trace: object) -> None:
        if isinstance(ended, Interrupted) and ended.number == signal.SIGUSR1 and self.run.signals.late:
            ended.why = "the time is up"


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

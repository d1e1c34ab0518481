"""Chooses a run's callbacks by its settings. Contains the smallest ones: late ranks, time limits."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from distgpt.callbacks.watchdog import Watchdog, save_and_exit
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.train.interfaces import KEPT, Budget, Callback, Times, ends_by_steps
from distgpt.core.train.progress import Finished, Pace
from distgpt.core.train.run import Limits, Run

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Validation


def callbacks_of(run: Run, limits: Limits) -> Sequence[Callback]:
    pace, result = Pace(run.progress, run.placement.rounds), list[Callback]()
    if run.comm.size > 1:
        result.append(Stragglers())
    end_job = partial(save_and_exit, run)
    result.append(Watchdog(run.comm, run.activity, limits, pace.usual, run.report.note, end_job))
    validation = run.assessment and run.assessment.validation
    if validation and run.settings.within_minutes:
        from distgpt.callbacks.forecast import Forecast  # loads all of evaluation

        result.append(Forecast(run, validation))
    if limits.end is not None and run.comm.rank == 0:  # other ranks are notified through a step's flags
        result.append(Deadline(run, limits.end, pace))
    return result


class Stragglers(AbstractContextManager["Stragglers"]):
    """Adds to each step's metrics the rank that reached the exchange last, and its delay."""

    def __exit__(self, *ended: object) -> None: ...

    def after_step(self, done: Finished) -> dict[str, float]:
        seconds = list(done.rank_seconds)
        if not any(seconds):  # not measured
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        last = float(seconds.pop(slowest))
        return {"slowest_rank": slowest, "late_s": last - fmean(seconds)}


STEPS, SAVES = 2.0, 1.5  # maximum ratio of the last step and save to the slowest recent ones
LEAVING = 2.0  # seconds to write the summary and end MPI
BYTES_PER_SECOND = 1e8  # disk speed, assumed before the first checkpoint


def latest_step(
    end: float, step_seconds: Sequence[float], save_seconds: float | None, save_bytes: float, saves: int = 1
) -> float:
    """Return the latest time at which a step may start, so that the run ends by `end`.

    After the step, `saves` checkpoints must still be written. `save_seconds` is None before the first one.
    """
    save = save_bytes / BYTES_PER_SECOND if save_seconds is None else save_seconds
    return end - LEAVING - saves * SAVES * save - STEPS * max(step_seconds, default=0.0)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A callback on rank 0. The run treats the limit as a SIGUSR1 once no further step fits."""

    run: Run
    end: float  # a time of time.monotonic()
    pace: Pace

    def look_ahead(self) -> None:
        """Update the latest start of another step."""
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
            ended.why = "time limit reached"


class PatientBudget(Budget):
    """Ends the run after `patience` evaluations without a lower loss. All ranks have the same losses."""

    def __init__(self, last: int, patience: int) -> None:
        super().__init__(last)
        self._patience, self._best, self._since = patience, math.inf, 0

    def after_evaluation(self, step: int, val_loss: float) -> str:
        self._since = 0 if val_loss < self._best else self._since + 1
        self._best = min(self._best, val_loss)
        if self._since < self._patience or self.last is None or step + 1 >= self.last:
            return ""
        self.last = step + 1
        evaluations = count(self._since, "evaluation")
        return (
            f"the validation loss was not lower in {evaluations}; step {self.last} is the last (--patience)"
        )


EVALUATION = 0.5  # ratio of a token's time in evaluation to its time in a step


class TimedBudget(Budget):
    """Determines the last step, and the elapsed fraction of the run's time.

    If the run ends by steps, unless its time is over first, this is the fraction of the possible steps.

    With each step, rank 0 sends the fraction that will have elapsed at the end of the next step. So all
    ranks have the same value and use the same learning rate.
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
        """`begun`: when this process's time starts. `spent`: seconds of earlier processes.

        `queued`: a step may be in flight when the next one is launched. `closing`: time after the last step
        that counts as well, in steps.
        """
        self._whole, self._pace, self._now = 60 * t.train_minutes, pace, now
        self._total = KEPT * self._whole
        self._begun, self._closing = begun - spent, closing
        self._ahead = 1 + 3 * queued  # steps that end before the step that uses the value of `elapsed_ahead`
        self._round = pace.rounds.length
        self._steps = t.steps if ends_by_steps(t) else None
        elapsed = min(1.0, spent / self._total)
        super().__init__(pace.progress.step if elapsed == 1 else self._steps, elapsed)
        if self._steps and elapsed < 1:
            self.elapsed = min(1.0, (pace.progress.step + 1) / self._steps)

    def seconds(self) -> float:
        """Return the run's seconds, or all of its time after the last step that it allows."""
        is_over = self._pace.progress.step == self.last != self._steps
        return self._whole if is_over else min(self._whole, self._now() - self._begun)

    def elapsed_ahead(self) -> float:
        """Return the fraction of the time elapsed after the next step, or 1 if no further step fits."""
        usual = self._pace.usual()
        end = self._now() - self._begun + self._ahead * usual
        total = max(self._total / 2, self._total - self._closing * usual)
        if end + usual > total:
            return 1.0
        if self._steps is None:
            return end / total
        step = self._pace.progress.step + 1 + self._ahead  # at `end`
        possible = step + (total - end) / usual if usual else math.inf
        return min(step / min(self._steps, possible), 1 - 1e-9)  # 1 would end the run

    def set_elapsed(self, elapsed: float, launched: int) -> None:
        """Use the value sent by rank 0. Once the time is over, the next step is the last."""
        self.elapsed = min(1.0, elapsed)
        if self.elapsed == 1 and (self.last is None or self.last > launched + self._round):
            self.last = (launched // self._round + 1) * self._round


def timed_budget(
    t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
) -> TimedBudget:
    """Return the budget of a run, which reserves time for the evaluation after the last step."""
    per_step = t.batch_size * model.config.seq_len
    closing = EVALUATION * (validation.count if validation else 0) / per_step
    return TimedBudget(t, pace, times.begun, times.spent, model.kernels.capabilities.is_async, closing)

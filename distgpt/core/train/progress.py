"""Progress of a run: completed steps, their pace, the main thread's activity, and due work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import MOST_RECENT, State

RECENT = 100  # steps in the average duration
STARTING, COMPUTING, EXCHANGING, UPDATING = "starting", "computing", "in the exchange", "updating"
EVALUATING, SAVING, SAMPLING = "evaluating", "saving", "writing a sample"


class Activity:
    """The main thread's current activity, its step and its start. Only that thread writes it.

    `count` is the number of activities started.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.enter(STARTING)

    def enter(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()
        self.count += 1


class Finished(NamedTuple):
    """A completed step. All fields except `seconds` are the same on all ranks."""

    loss: float  # mean over all ranks
    norm: float  # gradient norm
    lr: float
    rejected: str | None  # why the weights were not updated, "" if they were, None if not checked
    flags: list[float]  # flags, summed over all ranks (`StepFlags`)
    rank_seconds: list[float]  # each rank's time between exchanges; 0 or empty if unknown
    seconds: float = 0.0  # since the previous step completed


@dataclass(slots=True)
class Progress:
    """State that changes with each step. The same on all ranks, except `seconds`."""

    step: int = 0  # completed steps
    loss: float | None = None  # loss of this process's last good step
    val_loss: float | None = None  # loss of this process's last evaluation
    first_val_loss: float | None = None  # before the first step
    evaluation_pending: bool = False  # an evaluation was due after the last step, but a signal came first
    skipped: int = 0  # batches skipped for good
    bad_steps: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    seconds: list[float] = field(default_factory=list)  # duration of each step of this process

    def load(self, state: State) -> None:
        """Continue from a checkpoint. Bad steps counted since then stay counted."""
        self.step = state.step
        self.evaluation_pending = state.evaluation_pending
        self.skipped = state.skipped
        self.bad_steps = max(self.bad_steps, state.bad_steps)
        self.recent.clear()
        self.recent.extend(state.recent)

    def count_step(self, loss: float, seconds: float, is_good: bool) -> None:
        """Count a completed step. A bad one has not changed the weights."""
        self.step += 1
        self.seconds.append(seconds)
        if is_good:
            self.loss = loss

    def count_evaluation(self, val_loss: float | None) -> None:
        self.val_loss = val_loss
        if not self.step:
            self.first_val_loss = val_loss
        self.evaluation_pending = False


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of steps; after each, all ranks have the same weights. By default, a round is one step."""

    length: int = 1
    last: int = 0  # the run's last step, which ends a shorter round

    def ends(self, done: int) -> bool:
        """Return whether all ranks have the same weights after `done` steps."""
        return done % self.length == 0 or done == self.last

    def before(self, done: int) -> int:
        """Return the last step before this one that ended a round."""
        return (done - 1) // self.length * self.length

    def typical(self, first: int, seconds: Sequence[float]) -> float:
        """Return the median, over complete rounds, of the mean seconds per step.

        `first` is the number of steps before the first of `seconds`.
        """
        begins = range(-first % self.length, len(seconds) - self.length + 1, self.length)
        means = [sum(seconds[at : at + self.length]) / self.length for at in begins]
        return median(means or seconds)


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of this run's steps."""

    progress: Progress
    rounds: Rounds = Rounds()

    def recent(self) -> list[float]:
        """Return the durations of the last steps, at least one round.

        Before the first exchange of a round, append an estimate for the exchange.
        """
        step, seconds, length = self.progress.step, self.progress.seconds, self.rounds.length
        last = seconds[-max(RECENT, length) :]
        has_exchanged = step // length > (step - len(seconds)) // length
        return last if length == 1 or has_exchanged else [*last, sum(last)]

    def usual(self) -> float:
        """Return the median duration of recent steps, or with rounds the maximum; 0 before the first step."""
        usual = median if self.rounds.length == 1 else max
        last = self.recent()
        return usual(last) if last else 0.0


@dataclass(frozen=True, slots=True)
class Due:
    """Work due after a step. False if there is none."""

    compare: bool = False  # compare the ranks' weights
    evaluate: bool = False
    save: bool = False
    sample: bool = False

    def __bool__(self) -> bool:
        return self.compare or self.evaluate or self.save or self.sample


def due_after(t: TrainConfig, step: int, rounds: Rounds, is_evaluated: bool, is_last: bool) -> Due:
    """Return the work due after a step; within a round, it waits for the end. The same on all ranks.

    `SaveTimer` implements saving by time.
    """
    if not rounds.ends(step):
        return Due()
    before = rounds.before(step)

    def is_due(every: int) -> bool:
        return bool(every) and step // every > before // every

    return Due(
        # Also compare first and last: to detect a wrong exchange early, and never end with a bad model.
        compare=is_due(t.verify_every) or (bool(t.verify_every) and (is_last or not before)),
        evaluate=is_evaluated and (is_due(t.eval_every) or is_last),
        save=is_due(t.save_every) or is_last,
        sample=is_due(t.sample_every),
    )


class SaveTimer:
    """Timer for checkpoints by rank 0's clock, checked at a few steps that all ranks agree on.

    With each check, rank 0 announces the step of the next one. That is after half of the steps that the
    remaining time allows, to notice if the run slows down. It is at most twice the number of steps taken,
    because the first steps may only be queued.
    """

    def __init__(self, comm: Comm, minutes: float, step: int) -> None:
        self._comm = comm
        self._seconds = 60 * minutes
        self._first = step
        self._begun = self._saved_at = time.monotonic()
        self._next_look = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step. Collective at the agreed steps."""
        if not self._seconds or step < self._next_look:
            return False
        due, self._next_look = on_root(self._comm, lambda: self._decide(step))
        return due

    def saved(self) -> None:
        """Restart the timer after any checkpoint."""
        self._saved_at = time.monotonic()

    def _decide(self, step: int) -> tuple[bool, int]:
        now = time.monotonic()
        done = step - self._first
        left = self._seconds - (now - self._saved_at)
        if left <= 0:
            return True, step + 1
        half = left / 2 * done / max(now - self._begun, 1e-9)
        return False, step + max(1, int(min(half, 2 * done)))

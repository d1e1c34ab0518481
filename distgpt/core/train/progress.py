"""How far a run is: its finished steps and their pace, what its main thread does, and what is due next."""

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

RECENT = 100  # steps whose duration counts
STARTING, COMPUTING, EXCHANGING, UPDATING = "starting", "computing", "in the exchange", "updating"
EVALUATING, SAVING, SAMPLING = "evaluating", "saving", "writing a sample"


class Activity:
    """Says what the main thread does, after which step, and since when. It alone writes this.

    `count` is the number of activities it has begun.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.enter(STARTING)

    def enter(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()
        self.count += 1


class Finished(NamedTuple):
    """A step that is done on this rank. All but `seconds` is the same on all ranks."""

    loss: float  # the mean over all ranks
    norm: float  # of the gradients
    lr: float
    rejected: str | None  # why the weights were not updated, "" if they were, None if nobody has judged
    votes: list[float]  # of all ranks, summed (`Votes` in seams.py)
    rank_seconds: list[float]  # of each rank, from one exchange to the next; 0 or none if unknown
    seconds: float = 0.0  # since the step before it was done


@dataclass(slots=True)
class Progress:
    """All that changes from step to step. The same on all ranks, but for `seconds`."""

    step: int = 0  # steps that are finished
    loss: float | None = None  # of the last good step of this process
    val_loss: float | None = None  # of the last evaluation of this process
    first_val_loss: float | None = None  # before the first step
    evaluation_pending: bool = False  # one was due after the last step, and a signal came first
    skipped: int = 0  # batches that are not seen again
    bad_steps: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    seconds: list[float] = field(default_factory=list)  # of each step of this process

    def load(self, state: State) -> None:
        """Continue from a checkpoint. Bad steps that were counted since then stay counted."""
        self.step = state.step
        self.evaluation_pending = state.evaluation_pending
        self.skipped = state.skipped
        self.bad_steps = max(self.bad_steps, state.bad_steps)
        self.recent.clear()
        self.recent.extend(state.recent)

    def count_step(self, loss: float, seconds: float, is_good: bool) -> None:
        """Count a step as finished. A bad one has left the weights as they were."""
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
    """Steps after which all ranks hold the same weights: each one, or every Nth."""

    length: int = 1
    last: int = 0  # the run's last step, which ends a round that is shorter

    def ends(self, done: int) -> bool:
        """Return whether all ranks hold the same weights after this many steps."""
        return done % self.length == 0 or done == self.last

    def before(self, done: int) -> int:
        """Return the step before this one after which all ranks last held the same weights."""
        return (done - 1) // self.length * self.length

    def typical(self, first: int, seconds: Sequence[float]) -> float:
        """Return the median of the mean seconds of whole rounds. `first`: the steps before these."""
        begins = range(-first % self.length, len(seconds) - self.length + 1, self.length)
        means = [sum(seconds[at : at + self.length]) / self.length for at in begins]
        return median(means or seconds)


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of this run's steps."""

    progress: Progress
    rounds: Rounds = Rounds()

    def recent(self) -> list[float]:
        """Return the seconds of the last steps, at least those of one round.

        Before the first exchange of a round that is guessed.
        """
        step, seconds, length = self.progress.step, self.progress.seconds, self.rounds.length
        last = seconds[-max(RECENT, length) :]
        has_exchanged = step // length > (step - len(seconds)) // length
        return last if length == 1 or has_exchanged else [*last, sum(last)]

    def usual(self) -> float:
        """Return the usual seconds of a step, in rounds of the slowest one; 0 before the first."""
        usual = median if self.rounds.length == 1 else max
        last = self.recent()
        return usual(last) if last else 0.0


@dataclass(frozen=True, slots=True)
class Due:
    """Actions that are due after a step. It is false if none is."""

    compare: bool = False  # the ranks' weights
    evaluate: bool = False
    save: bool = False
    sample: bool = False

    def __bool__(self) -> bool:
        return self.compare or self.evaluate or self.save or self.sample


def due_after(t: TrainConfig, step: int, rounds: Rounds, is_evaluated: bool, is_last: bool) -> Due:
    """Return what the settings ask for; what is due within a round waits for its end. The same on all ranks.

    --save-every in minutes is up to `SaveTimer`.
    """
    if not rounds.ends(step):
        return Due()
    before = rounds.before(step)

    def is_due(every: int) -> bool:
        return bool(every) and step // every > before // every

    return Due(
        # First and last, too: an exchange that is not right shows at once, and no bad model is the result.
        compare=is_due(t.verify_every) or (bool(t.verify_every) and (is_last or not before)),
        evaluate=is_evaluated and (is_due(t.eval_every) or is_last),
        save=is_due(t.save_every) or is_last,
        sample=is_due(t.sample_every),
    )


class SaveTimer:
    """Says when a checkpoint is due by rank 0's clock, at a few steps that all ranks agree on.

    Rank 0 says with its answer at which step it will look again: after half of the steps that the time left
    is good for, so that it notices a run that gets slower. But after no more than twice the steps it has
    seen: the first ones may be queued, not done.
    """

    def __init__(self, comm: Comm, minutes: float, step: int) -> None:
        self._comm = comm
        self._seconds = 60 * minutes
        self._first = step
        self._begun = self._saved_at = time.monotonic()
        self._next_look = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step. Collective, at the steps that were agreed on."""
        if not self._seconds or step < self._next_look:
            return False
        due, self._next_look = on_root(self._comm, lambda: self._decide(step))
        return due

    def saved(self) -> None:
        """Count from now on: a checkpoint was written, for whatever reason."""
        self._saved_at = time.monotonic()

    def _decide(self, step: int) -> tuple[bool, int]:
        now = time.monotonic()
        done = step - self._first
        left = self._seconds - (now - self._saved_at)
        if left <= 0:
            return True, step + 1
        half = left / 2 * done / max(now - self._begun, 1e-9)
        return False, step + max(1, int(min(half, 2 * done)))

"""The schedule: after which steps ranks are compared, and the model evaluated, saved and sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.train.placement import Rounds


@dataclass(frozen=True, slots=True)
class Due:
    """Actions that are due after a step. It is false if none is."""

    compare: bool = False  # the ranks' weights
    evaluate: bool = False
    save: bool = False
    sample: bool = False

    def __bool__(self) -> bool:
        return self.compare or self.evaluate or self.save or self.sample


class Schedule:
    """Answers alike on all ranks."""

    def __init__(self, t: TrainConfig, comm: Comm, rounds: Rounds, is_evaluated: bool, step: int) -> None:
        """`step`: the finished steps by now."""
        self._t, self._rounds, self._is_evaluated = t, rounds, is_evaluated
        self._timer = SaveTimer(comm, 0 if t.save_every else t.save_minutes, step)

    def after(self, step: int, is_last: bool) -> Due:
        """Return what is due after this many steps. Collective."""
        due = due_after(self._t, step, self._rounds, self._is_evaluated, is_last)
        if self._rounds.ends(step) and self._timer.is_due(step):
            due = replace(due, save=True)
        return due

    def saved(self) -> None:
        """Count the time to the next checkpoint from now on."""
        self._timer.saved()


def due_after(t: TrainConfig, step: int, rounds: Rounds, is_evaluated: bool, is_last: bool) -> Due:
    """Return what the settings ask for; what is due within a round waits for its end."""
    if not rounds.ends(step):
        return Due()
    before = rounds.before(step)

    def is_due(every: int) -> bool:
        return bool(every) and step // every > before // every

    return Due(
        compare=is_due(t.verify_every),
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
        self._comm, self._seconds = comm, 60 * minutes
        self._first = step
        self._begun = self._saved_at = time.monotonic()
        self._next_look = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step. Collective, at the steps that were agreed on."""
        if not self._seconds or step < self._next_look:
            return False
        due, self._next_look = on_root(self._comm, lambda: self._decide(step))
        return bool(due)

    def saved(self) -> None:
        """Count from now on: a checkpoint was written, for whatever reason."""
        self._saved_at = time.monotonic()

    def _decide(self, step: int) -> tuple[bool, int]:
        now, done = time.monotonic(), step - self._first
        left = self._seconds - (now - self._saved_at)
        if left <= 0:
            return True, step + 1
        half = left / 2 * done / max(now - self._begun, 1e-9)
        return False, step + max(1, int(min(half, 2 * done)))

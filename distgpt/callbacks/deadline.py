"""Guard against a job that is killed at its time limit: the run saves and leaves before that."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.core.base.interrupts import Interrupted, PendingSignals
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.progress import Finished, Pace

STEPS, SAVES = 2.0, 1.5  # how much slower than the slowest recent one the last step and the last save may be
LEAVING = 2.0  # seconds: writing the summary, ending MPI
BYTES_PER_SECOND = 1e8  # of the disk, assumed until a checkpoint was written


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Known on rank 0. `end` is a moment of time.monotonic()."""

    end: float
    checkpoint_bytes: float

    def latest(self, step_seconds: Sequence[float], save_seconds: float | None, saves: int = 1) -> float:
        """Return the moment after which no step should begin. `step_seconds`: of recent steps.

        After it, `saves` checkpoints must still be written.
        """
        step = max(step_seconds, default=0.0)
        save = self.checkpoint_bytes / BYTES_PER_SECOND if save_seconds is None else save_seconds
        return self.end - LEAVING - saves * SAVES * save - STEPS * step


@dataclass(frozen=True, slots=True)
class Deadline:
    """A guard of rank 0: the run notes SIGUSR1 by itself when no further step fits before the limit."""

    limit: TimeLimit
    signals: PendingSignals
    pace: Pace
    checkpoints: Checkpoints
    saves: int  # checkpoints that may have to be written at the end

    def look_ahead(self) -> None:
        """Decide until when another step may begin."""
        recent, seconds = self.pace.recent(), self.checkpoints.seconds
        self.signals.deadline = self.limit.latest(recent, seconds, self.saves)

    def after_step(self, done: Finished) -> dict[str, float]:
        self.look_ahead()
        return {}

    def __enter__(self) -> None:
        self.look_ahead()

    def __exit__(self, kind: object, ended: BaseException | None, trace: object) -> None:
        if isinstance(ended, Interrupted) and ended.number == signal.SIGUSR1 and self.signals.late:
            ended.why = "the time is up"

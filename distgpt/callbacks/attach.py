"""Attach guards to a run, by its settings, and the smallest of them: late ranks, a job's time limit."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from distgpt.callbacks.watchdog import Stall, Watchdog, save_and_exit
from distgpt.core.base.formatting import count, duration
from distgpt.core.base.interrupts import Interrupted, PendingSignals
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.progress import Finished, Pace
from distgpt.core.train.run import Limits, Run
from distgpt.core.train.seams import Guard

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


def callbacks_of(run: Run, limits: Limits) -> Sequence[Guard]:
    """Return what watches a run, by its settings and its limits."""
    pace, found = Pace(run.progress, run.placement.rounds), list[Guard]()
    slowest: Callable[[], str] = str  # "" where there is no other rank
    if run.comm.size > 1:
        stragglers = Stragglers()
        slowest = stragglers.sentence
        found.append(stragglers)
    stall, end_job = Stall(limits.stall_timeout, limits.stall_abort), partial(save_and_exit, run)
    found.append(Watchdog(run.comm, run.activity, stall, pace.usual, slowest, run.report.note, end_job))
    if limits.end is not None and run.comm.rank == 0:  # the others hear of it by a step's votes
        saved = run.placement.saved_buffers(is_common=False)
        limit = TimeLimit(limits.end, 4 * saved * run.model.layout.size)
        saves = 2 if run.settings.save == "async" else 1
        found.append(Deadline(limit, run.signals, pace, run.checkpoints, saves))
    return found

"""Attach guards to a run: which of them, by its settings, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from distgpt.callbacks.full_disk import room_for
from distgpt.callbacks.watchdog import Stall, Watchdog, save_and_exit
from distgpt.core.base.tables import Table, part
from distgpt.core.config import TrainConfig
from distgpt.core.train.progress import Pace
from distgpt.core.train.run import Run, Seams
from distgpt.core.train.seams import Guard

MakeGuard = Callable[[Run], Guard | None]  # None: this run needs none

GUARDS: Table[MakeGuard] = Table("guards", "the guard", {})


def guarded(
    t: TrainConfig, end: float | None = None, timeout: float | None = None, abort: float | None = None
) -> Seams:
    """Return the seams of a run with what its settings ask for.

    `end` is a moment of time.monotonic() by which the run has to be gone. A run without progress is reported
    after `timeout` seconds (None: by its pace), and ended after `abort` (None: never).
    """
    added = [GUARDS[name] for name in GUARDS]  # now: nothing of the run is on the disk yet
    guards = partial(_guards, added=added, end=end, stall=Stall(timeout, abort))
    seams = Seams(disk=room_for, guards=guards)
    if t.keep_every or t.keep_every_minutes:
        from distgpt.callbacks.retention import Retention

        seams = replace(seams, outdated=Retention)
    if t.on_bad_step != "stop" or t.spike_zscore:
        from distgpt.callbacks.bad_steps import BadSteps

        seams = replace(seams, judge=BadSteps)
    if t.train_minutes:
        from distgpt.callbacks.timed import timed_clock

        seams = replace(seams, clock=timed_clock)
    return seams


def _guards(run: Run, added: Sequence[MakeGuard], end: float | None, stall: Stall) -> Sequence[Guard]:
    """Return the guards of a run, once its history says what its bits depend on. Collective."""
    part("kept", keep_nothing)(run)
    pace, found = Pace(run.progress, run.placement.rounds), list[Guard]()
    slowest: Callable[[], str] = str  # "" where there is no other rank
    if run.comm.size > 1:
        from distgpt.callbacks.stragglers import Stragglers

        stragglers = Stragglers()
        slowest = stragglers.sentence
        found.append(stragglers)
    end_job = partial(save_and_exit, run)
    found.append(Watchdog(run.comm, run.activity, stall, pace.usual, slowest, run.report.note, end_job))
    found += (guard for make in added if (guard := make(run)) is not None)
    if end is not None and run.comm.rank == 0:  # the others hear of it by a step's votes
        from distgpt.callbacks.deadline import Deadline, TimeLimit

        saved = run.placement.saved_buffers(is_common=False)
        limit = TimeLimit(end, 4 * saved * run.model.layout.size)
        saves = 2 if run.settings.save == "async" else 1
        found.append(Deadline(limit, run.signals, pace, run.checkpoints, saves))
    return found


def keep_nothing(run: Run) -> None:
    """Leave the history as it is, where no proofs are installed."""

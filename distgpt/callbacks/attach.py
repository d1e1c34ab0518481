"""Attach guards to a run: which of them, by its settings, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from distgpt.callbacks.watchdog import Stall, Watchdog, save_and_exit
from distgpt.core.train.progress import Pace
from distgpt.core.train.run import Limits, Run
from distgpt.core.train.seams import Guard


def callbacks_of(run: Run, limits: Limits) -> Sequence[Guard]:
    """Return what watches a run, by its settings and its limits."""
    pace, found = Pace(run.progress, run.placement.rounds), list[Guard]()
    slowest: Callable[[], str] = str  # "" where there is no other rank
    if run.comm.size > 1:
        from distgpt.callbacks.stragglers import Stragglers

        stragglers = Stragglers()
        slowest = stragglers.sentence
        found.append(stragglers)
    stall, end_job = Stall(limits.stall_timeout, limits.stall_abort), partial(save_and_exit, run)
    found.append(Watchdog(run.comm, run.activity, stall, pace.usual, slowest, run.report.note, end_job))
    if limits.end is not None and run.comm.rank == 0:  # the others hear of it by a step's votes
        from distgpt.callbacks.deadline import Deadline, TimeLimit

        saved = run.placement.saved_buffers(is_common=False)
        limit = TimeLimit(limits.end, 4 * saved * run.model.layout.size)
        saves = 2 if run.settings.save == "async" else 1
        found.append(Deadline(limit, run.signals, pace, run.checkpoints, saves))
    return found

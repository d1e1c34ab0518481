"""Attach guards to a run: which of them, by its settings, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import Say
from distgpt.evaluation.assessment import Validation
from distgpt.model.model import Model
from distgpt.saved.modelfile import Description
from distgpt.saved.rundir import RunDirectory
from distgpt.stages import Stage
from distgpt.training.clock import Clock
from distgpt.training.exchange.local_steps import buffers_saved
from distgpt.training.guards.full_disk import Room, weights_bytes
from distgpt.training.guards.stuck import save_and_exit
from distgpt.training.guards.watchdog import Stall, Watchdog
from distgpt.training.opening.plan import Plan
from distgpt.training.progress import Pace, Progress
from distgpt.training.run import Guard, Judge, Run
from distgpt.training.seams import Seams, plain_clock
from distgpt.training.step import Inspector


def guarded(end: float | None = None, stall: Stall | None = None) -> Seams:
    """Return the seams of a run with all guards that its settings ask for.

    `end` is a moment of time.monotonic() by which the run has to be gone; `stall`: when it counts as stuck.
    """
    return Seams(
        judge=_judge,
        clock=_clock,
        disk=_room,
        inspector=_inspector,
        guards=partial(_guards, end=end, stall=stall or Stall()),
    )


def _judge(t: TrainConfig, progress: Progress) -> Judge:
    if t.on_bad_step == "stop" and not t.spike_zscore:
        return Seams().judge(t, progress)
    from distgpt.training.guards.bad_steps import BadSteps

    return BadSteps(t, progress)


def _clock(plan: Plan, stage: Stage, pace: Pace, model: Model, validation: Validation | None) -> Clock:
    if not pace.config.train_minutes:
        return plain_clock(plan, stage, pace, model, validation)
    from distgpt.training.timed import timed_clock

    return timed_clock(plan, stage, pace, model, validation)


def _room(directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say) -> Room:
    return Room(directory, t, weights_bytes(model, description), say)


def _inspector(comm: Comm, model: Model, t: TrainConfig) -> Inspector | None:
    if not t.recheck_every:
        return None
    from distgpt.training.guards.recheck import Recheck

    return Recheck(comm, model, t)


def _guards(run: Run, end: float | None, stall: Stall) -> Sequence[Guard]:
    """Return the guards of a run: the first is entered first, and sees how the others end. Collective."""
    pace, found = Pace(run.settings, run.comm.size, run.progress), list[Guard]()
    slowest: Callable[[], str] = str  # "" where there is no other rank
    if run.comm.size > 1:
        from distgpt.training.guards.stragglers import Stragglers

        stragglers = Stragglers()
        slowest = stragglers.sentence
        found.append(stragglers)
    end_job = partial(save_and_exit, run)
    found.append(Watchdog(run.comm, run.activity, stall, pace.usual, slowest, run.report.note, end_job))
    if end is not None and run.comm.rank == 0:  # the others hear of it by a step's votes
        from distgpt.training.guards.deadline import Deadline, TimeLimit

        t = run.settings
        saved = buffers_saved(t, run.comm.size, is_common=False)
        limit = TimeLimit(end, 4 * saved * run.model.layout.size)
        saves = 2 if t.save == "async" else 1
        found.append(Deadline(limit, run.signals, pace, run.checkpoints, saves))
    return found

"""The seams of a run: where optional code attaches to it. Each makes one object; by default all are plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distgpt.core.base.errors import Say
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.model import Model
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.assessment import Validation
from distgpt.core.train.checkpoints import Disk
from distgpt.core.train.clock import Clock
from distgpt.core.train.judge import FiniteJudge
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import Pace, Progress
from distgpt.core.train.run import Guard, Judge, Run
from distgpt.core.train.step import Inspector


def plain_clock(
    plan: Plan, stage: Stage, t: TrainConfig, pace: Pace, model: Model, validation: Validation | None
) -> Clock:
    """Return a clock that counts steps, up to those that the plan has for now."""
    return Clock(t.steps if plan.until is None else plan.until)


def plain_disk(
    directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
) -> Disk:
    """Return a disk that just writes."""
    return Disk()


def no_guards(run: Run) -> Sequence[Guard]:
    """Return none."""
    return ()


@dataclass(frozen=True, slots=True)
class Seams:
    """Functions that make a run's objects. Those that communicate do so alike on all ranks."""

    judge: Callable[[TrainConfig, Progress], Judge] = FiniteJudge
    clock: Callable[[Plan, Stage, TrainConfig, Pace, Model, Validation | None], Clock] = plain_clock
    disk: Callable[[RunDirectory, TrainConfig, Model, Description, Say], Disk] = plain_disk
    inspector: Callable[[Comm, Model, TrainConfig], Inspector] | None = None
    guards: Callable[[Run], Sequence[Guard]] = no_guards


def plain_seams(
    t: TrainConfig, end: float | None = None, timeout: float | None = None, abort: float | None = None
) -> Seams:
    """Return the seams of a run without guards: nothing looks at the clock or at a run that is stuck."""
    return Seams()

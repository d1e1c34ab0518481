"""The seams of a run: where optional code attaches to it. Each makes one object; by default all are plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import Say
from distgpt.evaluation.assessment import Validation
from distgpt.model.model import Model
from distgpt.saved.modelfile import Description
from distgpt.saved.rundir import RunDirectory
from distgpt.stages import Stage
from distgpt.training.checkpoints import Disk
from distgpt.training.clock import Clock
from distgpt.training.judge import FiniteJudge
from distgpt.training.opening.plan import Plan
from distgpt.training.progress import Pace, Progress
from distgpt.training.run import Guard, Judge, Run
from distgpt.training.step import Inspector


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

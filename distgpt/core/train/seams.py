"""The seams of a run: where optional code attaches to it. Each makes one object; by default all are plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distgpt.core.base.errors import Say
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.assessment import Validation
from distgpt.core.train.checkpoints import Disk
from distgpt.core.train.clock import Clock, Times
from distgpt.core.train.judge import FiniteJudge
from distgpt.core.train.progress import Pace, Progress
from distgpt.core.train.run import Guard, Judge, Run
from distgpt.core.train.step import Inspector


def plain_clock(
    t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
) -> Clock:
    """Return a clock that counts steps, up to the `last` one for now."""
    return Clock(last)


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
    clock: Callable[[TrainConfig, int, Times, Pace, Model, Validation | None], Clock] = plain_clock
    disk: Callable[[RunDirectory, TrainConfig, Model, Description, Say], Disk] = plain_disk
    inspector: Callable[[Comm, Model, TrainConfig], Inspector] | None = None
    guards: Callable[[Run], Sequence[Guard]] = no_guards

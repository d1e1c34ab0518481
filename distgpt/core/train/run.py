"""Everything one rank holds during a run, and who makes its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distgpt.core.base.errors import Say
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import Outdated, State, beyond
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.progress import Activity, Pace, Progress
from distgpt.core.train.report import Report
from distgpt.core.train.seams import Clock, Disk, Guard, Judge, Times
from distgpt.core.train.sharing import Exchange, OptimizerState, Placement
from distgpt.core.train.step import Launch, Step

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Assessment, Validation


class BadStep(Exception):
    """A step that the run has to recover from: raised by a judge, not the plain one, on all ranks."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.reason, self.step = reason, step

    def recover(self, run: Run) -> None:
        """Bring the run back to an earlier step. Collective."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Run:
    """The model and its optimizer, what they are trained with, and what is written and reported."""

    config: RunConfig  # as asked for
    settings: TrainConfig  # of `config`, with automatic values resolved by this machine's memory
    stage: Stage
    where: dict[str, object]  # hosts, batch job, launcher and MPI, for what the run writes
    placement: Placement
    optimizer_state: OptimizerState
    tokenizer: Tokenizer
    batches: Batches
    step: Step
    assessment: Assessment | None  # None: nothing is held out, and no metric is asked for
    directory: RunDirectory
    start: Path | None  # the checkpoint from which this process began
    progress: Progress
    clock: Clock
    identity: State  # what a checkpoint says of this run at any step; the rest comes from `progress`
    checkpoints: Checkpoints
    report: Report
    signals: PendingSignals
    judge: Judge
    launch: Launch  # the step's own, or one around it that measures
    guards: tuple[Guard, ...]
    sample: Callable[..., str] | None  # writes a text (sampling.py), on rank 0 of a run that samples

    @property
    def comm(self) -> Comm:
        return self.stage.comm

    @property
    def model(self) -> Model:
        return self.step.model

    @property
    def activity(self) -> Activity:
        return self.step.activity

    @property
    def optimizer(self) -> AdamW:
        return self.optimizer_state.optimizer

    @property
    def exchange(self) -> Exchange:
        return self.step.exchange

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a validation loss in bits per byte; None where that is unknown."""
        return self.assessment.bits_per_byte(loss) if self.assessment else None

    def state(self) -> State:
        """Return what a checkpoint says now, beside weights and moments; `Checkpoints` adds the best loss."""
        return self.progress.save(replace(self.identity, seconds=self.clock.seconds()))

    def load(self, state: State) -> None:
        """Continue from what a checkpoint says beside weights and moments."""
        self.progress.load(state)
        self.batches.skipped = state.skipped


@dataclass(frozen=True, slots=True)
class Seams:
    """Functions that make a run's objects. Those that communicate do so alike on all ranks."""

    judge: Callable[[TrainConfig, Progress], Judge] = Judge
    clock: Callable[[TrainConfig, int, Times, Pace, Model, Validation | None], Clock] = (
        lambda t, last, *about: Clock(last)
    )
    disk: Callable[[RunDirectory, TrainConfig, Model, Description, Say], Disk] = lambda *about: Disk()
    outdated: Callable[[TrainConfig], Outdated] = lambda t: partial(beyond, t.keep)
    guards: Callable[[Run], Sequence[Guard]] = lambda run: ()


def plain_seams(
    t: TrainConfig, end: float | None = None, timeout: float | None = None, abort: float | None = None
) -> Seams:
    """Return the seams of a run without guards: nothing looks at the clock or at a run that is stuck."""
    return Seams()

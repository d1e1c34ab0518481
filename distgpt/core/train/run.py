"""Everything one rank holds during a run. `open_run` makes it; nobody writes into it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.activity import Activity
from distgpt.core.train.assessment import Assessment
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.clock import Clock
from distgpt.core.train.exchange import Exchange
from distgpt.core.train.in_flight import Finished
from distgpt.core.train.placement import OptimizerState, Placement
from distgpt.core.train.progress import Progress
from distgpt.core.train.reading import Reading
from distgpt.core.train.report import Report
from distgpt.core.train.step import Launch, Step
from distgpt.core.train.votes import Votes


class BadStep(Exception):
    """A step that the run has to recover from: raised by its judge, on all ranks."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.reason, self.step = reason, step


class Judge(Protocol):
    """Says which steps may change the weights, and what follows where one may not. The same on all ranks."""

    waits: bool  # whether its objection must be known before an update even on kernels with a queue

    def objection(self, loss: float, norm: float) -> str:
        """Return why a step must not change the weights, "" if it may."""

    def judge(self, done: Finished) -> str:
        """Return why a finished step has not changed the weights, "" if it has.

        Raises the error that ends the run, or BadStep.
        """

    def recover(self, run: Run, bad: BadStep) -> None:
        """Bring the run back to an earlier step. Collective."""


class Guard(Protocol):
    """Watches a run from its first to its last step. It calls no collective and changes no step.

    It may ask that the run end, as a signal does.
    """

    def __enter__(self) -> object: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def settled(self, done: Finished) -> dict[str, float]:
        """Take note of a finished step. Return what to add to its metrics."""


@dataclass(frozen=True, slots=True)
class Run:
    """The model and its optimizer, what they are trained with, and what is written and reported."""

    config: RunConfig  # as asked for
    settings: TrainConfig  # of `config`, with automatic values resolved by this machine's memory
    stage: Stage
    where: dict[str, Any]  # hosts, batch job, launcher and MPI, for what the run writes
    model: Model
    placement: Placement
    optimizer_state: OptimizerState
    tokenizer: Tokenizer
    batches: Batches
    step: Step
    assessment: Assessment
    reading: Reading
    directory: RunDirectory
    start: Path | None  # the checkpoint from which this process began
    progress: Progress
    clock: Clock
    identity: State  # what a checkpoint says of this run at any step; the rest comes from `progress`
    checkpoints: Checkpoints
    report: Report
    signals: PendingSignals
    judge: Judge
    votes: Votes
    launch: Launch  # the step's own, or one around it that measures
    guards: tuple[Guard, ...]

    @property
    def comm(self) -> Comm:
        return self.stage.comm

    @property
    def activity(self) -> Activity:
        return self.step.activity

    @property
    def optimizer(self) -> AdamW:
        return self.optimizer_state.optimizer

    @property
    def exchange(self) -> Exchange:
        return self.step.exchange

    def state(self) -> State:
        """Return what a checkpoint says now, beside weights and moments; `Checkpoints` adds the best loss."""
        return self.progress.save(replace(self.identity, seconds=self.clock.seconds()))

    def load(self, state: State) -> None:
        """Continue from what a checkpoint says beside weights and moments."""
        self.progress.load(state)
        self.batches.skipped = state.skipped

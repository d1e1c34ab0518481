"""Everything one rank holds during a run. `open_run` makes it; nobody writes into it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distgpt.comm.api import Comm
from distgpt.config import RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.evaluation.assessment import Assessment
from distgpt.interrupts import PendingSignals
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved.checkpoint import State
from distgpt.saved.rundir import RunDirectory
from distgpt.stages import Stage
from distgpt.training.checkpoints import Checkpoints
from distgpt.training.clock import Clock
from distgpt.training.exchange.api import Exchange
from distgpt.training.guards.bad_steps import BadSteps
from distgpt.training.guards.deadline import Deadline
from distgpt.training.guards.stragglers import Stragglers
from distgpt.training.guards.watchdog import Activity, Stall
from distgpt.training.placement import OptimizerState, Placement
from distgpt.training.progress import Pace, Progress
from distgpt.training.reading import Reading
from distgpt.training.report import Report
from distgpt.training.step import Step


@dataclass(frozen=True, slots=True)
class Guards:
    """Find what may interrupt the run. Their files are in guards/; the loop calls each by its name."""

    activity: Activity
    signals: PendingSignals
    pace: Pace
    bad_steps: BadSteps
    stragglers: Stragglers
    deadline: Deadline
    stall: Stall


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
    guards: Guards

    @property
    def comm(self) -> Comm:
        return self.stage.comm

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

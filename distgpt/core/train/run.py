"""The state of a run on one rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.interfaces import Budget, Callback, StatefulCallback, StepPolicy, callback_failed
from distgpt.core.train.parallel_strategy import GradientSync, OptimizerState, Placement
from distgpt.core.train.progress import Activity, Progress
from distgpt.core.train.report import Report
from distgpt.core.train.step import Launch, Step

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Assessment


class BadStep(Exception):
    """A bad step that the run must recover from. Raised on all ranks, but not by the default policy."""

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(reason)
        self.reason, self.step = reason, step

    def recover(self, run: Run) -> None:
        """Return the run to an earlier step. Collective."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Run:
    """The model, its optimizer, its data, and its outputs."""

    config: RunConfig  # the settings as requested
    settings: TrainConfig  # `config.train` with automatic values resolved for this machine's memory
    stage: Stage
    where: dict[str, Any]  # hosts, batch job, launcher and MPI, for output files
    placement: Placement
    optimizer_state: OptimizerState
    tokenizer: Tokenizer
    batches: Batches
    step: Step
    assessment: Assessment | None  # None: no held-out text and no metric
    directory: RunDirectory
    start: Path | None  # the checkpoint that this process started from
    progress: Progress
    budget: Budget
    checkpoints: Checkpoints
    report: Report
    signals: PendingSignals
    step_policy: StepPolicy
    launch: Launch  # the step's own, or a wrapper that measures
    callbacks: tuple[Callback, ...] = ()  # created from the run

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
    def gradient_sync(self) -> GradientSync:
        return self.step.gradient_sync

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Convert a validation loss to bits per byte; None if unknown."""
        return self.assessment.bits_per_byte(loss) if self.assessment else None

    def assembled(self) -> str:
        """Return a one-line description of the run's components. For rank 0."""
        parts = [f"updates: {type(self.optimizer).__name__}{', recorded' * self.step.is_recorded}"]
        if self.comm.size > 1:
            nodes = count(len({host.partition(":")[0] for host in self.where["hosts"]}), "node")
            parts.append(f"gradients: {self.gradient_sync.name} ({self.comm.size} ranks on {nodes})")
        kind = type(components())
        if not kind.__module__.startswith("distgpt."):
            parts.append(f"components: {kind.__module__}:{kind.__qualname__}")
        return "; ".join(parts)

    def state(self) -> State:
        """Return the checkpoint state except weights and moments. `Checkpoints` adds the best loss."""
        states = {}
        for name, callback in self._stateful_callbacks().items():
            try:
                states[name] = json.loads(json.dumps(callback.state()))
            except (TypeError, ValueError) as error:
                raise callback_failed(callback, error) from error
        progress, micro_batches = self.progress, self.step.micro_batches
        return State(
            step=progress.step,
            seed=self.settings.seed,
            ranks=self.comm.size,
            corpus=self.batches.fingerprint,
            micro_batches=self.settings.grad_accum,
            shares=micro_batches.shares,
            hosts=micro_batches.hosts,
            evaluation_pending=progress.evaluation_pending,
            skipped=progress.skipped,
            bad_steps=progress.bad_steps,
            recent=tuple(progress.recent),
            seconds=self.budget.seconds(),
            guards=states,
        )

    def load(self, state: State) -> None:
        """Continue from a checkpoint's state, except weights and moments."""
        self.progress.load(state)
        self.batches.skipped = state.skipped
        self.load_guards(state)

    def load_guards(self, state: State) -> None:
        """Restore the saved state of each callback."""
        for name, callback in self._stateful_callbacks().items():
            if name in state.guards:
                callback.load(state.guards[name])

    def _stateful_callbacks(self) -> dict[str, StatefulCallback]:
        return {
            type(each).__qualname__: each for each in self.callbacks if isinstance(each, StatefulCallback)
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process's run that are not settings. None: no limit."""

    end: float | None = None  # deadline on time.monotonic()
    stall_timeout: float | None = None  # seconds without progress before a report; None: automatic
    stall_abort: float | None = None  # seconds without progress that end the run

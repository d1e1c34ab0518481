"""Interfaces of a run with default implementations, in the order in which a run uses them.

interface   purpose                                     called by
ModelKind   how to build, train and describe a model    setup.py, before there is a model
StepPolicy  which steps may update the weights          `Step._update`, `finish_steps`
Budget      which step is the last one                  `run_steps`, `finish_steps`
StepFlags   flags that ranks share with each step       `Step.launch`, `finish_steps`
Callback    watches completed steps; an observer        `finish_steps`; none by default
Listener    shows and records progress; an observer     report.py
Disk        writes checkpoints and weights              checkpoints.py
RetentionPolicy  which checkpoints are expired          save_checkpoint; default: `expired_checkpoints`

An interface that is a class is its own default. parallel_strategy.py defines how ranks share a step.
`Components` has a factory method for each.
"""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from distgpt.core.base.checked import JsonObject
from distgpt.core.base.errors import DistgptError, NonFiniteError, StorageError, UsageError
from distgpt.core.base.interrupts import PendingSignals, first_of
from distgpt.core.comm.agree import collective_error
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description
from distgpt.core.train.progress import Finished, Progress

# The share of the time limit for steps. The rest is for the last checkpoint and the weights.
KEPT = 0.985


class ModelKind:
    """Properties of a model that a run needs before creating it. In this default, all weights are trained.

    All ranks use the same kind.
    """

    may_move = frozenset[str]()  # settings of files that a resumed run may find at another path

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        """Return the model with uninitialized weights."""
        return Model(Architecture(run.model), kernels)

    def trained(self, run: RunConfig) -> Layout:
        """Return the layout of trained parameters, which gradients, moments and checkpoints have."""
        return Architecture(run.model).layout

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Return the description that the run's files contain. Collective."""
        return Description(run, tokenizer)

    def begins_with(self, t: TrainConfig) -> str:
        """Return the file of pretrained weights; "" for random weights."""
        return t.init

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Load the weights that are not trained. Collective."""

    def use_of_init(self, t: TrainConfig) -> str:
        """Describe how a new run uses the model of --init; its name precedes this phrase."""
        return "is trained further"

    def reject_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Reject weights that this kind of run cannot start with; if `resumed`, they are a checkpoint's."""
        if resumed and origin.untrainable:
            raise UsageError(f"{weights} is from a run that cannot be resumed: {origin.untrainable}")
        origin.reject_training(t)
        if not resumed:
            origin.reject_incomplete(weights)

    def reject_moved(self, t: TrainConfig) -> None:
        """Raise an error if a file that a resumed run needs is missing."""


WHOLE = ModelKind()


def not_finite(loss: float, norm: float) -> str:
    """Return why a step is not finite, "" if it is."""
    for what, value in {"loss": loss, "gradient": norm}.items():
        if not math.isfinite(value):
            return f"the {what} is not finite"
    return ""


class StepPolicy:
    """Policy for which steps may update the weights; the same on all ranks.

    This default ends the run at the first step that is not finite.
    """

    # Whether to check before an update even if steps are queued. If not, `Step` gets no `rejection_reason` on
    # a GPU, whose kernels skip updates that are not finite.
    waits = False

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def rejection_reason(self, loss: float, norm: float) -> str:
        """Return why a step must not update the weights, "" if it may."""
        return not_finite(loss, norm)

    def check_step(self, done: Finished) -> str:
        """Return why a completed step has not updated the weights, "" if it has.

        Raises the error that ends the run. A recoverable step raises BadStep (run.py).
        """
        # None: a queued step was not checked before its update.
        reason = self.rejection_reason(done.loss, done.norm) if done.rejected is None else done.rejected
        if reason:
            bad = described(reason, self._progress.step + 1, done.loss, done.norm)
            raise collective_error(NonFiniteError(ending(bad, self._config)))
        return ""


def described(reason: str, step: int, loss: float, norm: float) -> str:
    return f"{reason} at step {step} (loss {loss}, gradient norm {norm})"


def ending(bad: str, config: TrainConfig) -> str:
    """Return the error message of a run that ends at a bad step."""
    clip = "a smaller --clip" if config.clip else "--clip 1"
    hint = f"; try a lower --lr, a longer --warmup, {clip} or --on-bad-step skip"
    return f"{bad}{hint}; earlier checkpoints are kept"


@dataclass(frozen=True, slots=True)
class Times:
    """Start of this process's measured time, and time used before."""

    begun: float  # value of time.monotonic()
    spent: float  # seconds of earlier processes


def time_is_over(seconds: float, t: TrainConfig) -> bool:
    """Return whether a run has a time limit, and it is over after `seconds` seconds."""
    return bool(t.train_minutes) and seconds >= KEPT * 60 * t.train_minutes


def ends_by_steps(t: TrainConfig) -> bool:
    """Return whether the run ends after `steps`. Without epochs, those of a time-limited run are a guess."""
    return bool(t.epochs) or not t.train_minutes


def is_over(step: int, seconds: float, t: TrainConfig) -> bool:
    """Return whether a run is over after these steps and seconds."""
    return time_is_over(seconds, t) or (ends_by_steps(t) and step >= t.steps)


class Budget:
    """Budget that determines the last step. This default counts steps; `TimedBudget` uses time."""

    def __init__(self, last: int | None, elapsed: float | None = None) -> None:
        self.last = last  # None: not known yet
        self.elapsed = elapsed  # elapsed fraction of the run's time; None: no time limit

    def seconds(self) -> float:
        """Return the run's elapsed time."""
        return 0.0

    def elapsed_ahead(self) -> float:
        """Return the elapsed fraction after the next step. Rank 0 sends it with each step."""
        return 0.0

    def set_elapsed(self, elapsed: float, launched: int) -> None:
        """Set the elapsed fraction that rank 0 sent."""

    def after_evaluation(self, step: int, val_loss: float) -> str:
        """Return why the next step is the last, or ""."""
        return ""


@dataclass(frozen=True, slots=True)
class ReducedFlags:
    """Flags of all ranks, summed with a step; the same on all ranks."""

    stop: signal.Signals | None  # the signal with the highest priority
    has_lost_disk: bool  # rank 0 cannot save, and must end the run
    elapsed: float  # elapsed fraction of the run's time after the next step


@dataclass(frozen=True, slots=True)
class StepFlags:
    """Collects this rank's flags and parses the sums.

    Their number is fixed (`FLAG_COUNT`). Another number would change how an Allreduce over three or more
    ranks splits the buffer, and thereby the rounding of the gradients.
    """

    comm: Comm
    signals: PendingSignals
    disk: Disk
    budget: Budget

    def local_flags(self) -> list[float]:
        """Return this rank's flags, which are its signals, a lost disk, and rank 0's elapsed fraction."""
        elapsed = self.budget.elapsed_ahead() if self.comm.rank == 0 else 0.0
        return [*self.signals.counts(), int(self.disk.lost is not None), elapsed]

    @staticmethod
    def parse_flags(sums: Sequence[float], grad_sync: str) -> ReducedFlags:
        """Parse the summed flags of a step. `grad_sync` names the exchange, for errors."""
        *signals, disk, elapsed = sums
        if any(count < 0 or count % 1 for count in (*signals, disk)):
            raise DistgptError(
                f"--grad-sync {grad_sync} returned invalid step flags; every rank must sum the same elements"
                " in each call"
            )
        return ReducedFlags(first_of(signals), bool(disk), float(elapsed))


class Callback(AbstractContextManager[object], Protocol):
    """Callback of a run from its first to its last step. It must not communicate or change steps.

    It may request that the run ends, as a signal does.
    """

    def after_step(self, done: Finished) -> dict[str, float]:
        """Process a completed step. Return additional metrics."""


@runtime_checkable
class StatefulCallback(Callback, Protocol):
    """A callback whose state on rank 0 is saved in checkpoints as JSON."""

    def state(self) -> JsonObject: ...
    def load(self, state: JsonObject) -> None:
        """Continue from a checkpoint. Called on every rank."""


def callback_failed(callback: Callback, error: Exception) -> DistgptError:
    """Return an error that names the callback, and the file and line of its failure."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the call itself
    where = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    name, what = (type(each).__qualname__ for each in (callback, error))
    return DistgptError(f"the callback {name} failed: {what}: {error}{where}")


class Listener:
    """Shows or records the progress of a run, only on rank 0. This default does nothing."""

    def started(self, facts: dict[str, Any]) -> None: ...
    def stepped(self, metrics: dict[str, float]) -> None: ...
    def evaluated(self, metrics: dict[str, float]) -> None: ...
    def noted(self, text: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class Disk:
    """The disk for checkpoints and weights. `callbacks/full_disk.py` frees space on a full disk."""

    lost: StorageError | None = None  # why rank 0 cannot save, which ends the run

    def reserved(self, comm: Comm, step: int) -> AbstractContextManager[None]:
        """Reserve space for the final weights during the context. Collective."""
        return nullcontext()

    def write(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        """Call write(), which writes `n_bytes` bytes of this step. Thread-safe."""
        write()

    def write_final(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        """Call write(), which writes the final weights."""
        write()

    def report(self) -> None:
        """Report deferred messages. In the main thread."""

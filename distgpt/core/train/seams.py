"""The seams of a run: each contract with its plain version beside it, in the order in which a run meets them.

contract    answers or does                                called by
ModelKind   what is built, trained and described           setup.py, before there is a model
Judge       which steps may change the weights             `Step._update`, `settle`
Clock       which step is the last one                     `take_steps`, `settle`
Votes       what ranks tell each other with each step      `Step.launch`, `settle`
Guard       watches finished steps; an observer            `settle`; a plain run has none
Listener    shows and records progress; an observer        report.py
Disk        writes what is saved                           checkpoints.py
Outdated    which checkpoints may go                       save_checkpoint; `beyond` is the plain one

A contract that is a class is its own plain version. How ranks share a step has a page of its own: sharing.py.
`Components` has a method for each that makes it.
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
from distgpt.core.comm.agree import shared
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description
from distgpt.core.train.progress import Finished, Progress

# The share of the time in which steps are taken: the last checkpoint and the weights are written in the rest.
KEPT = 0.985


class ModelKind:
    """Answers what a run asks about its model before it has one: here, one whose weights are all trained.

    All ranks take the same kind. Others are derived from this one.
    """

    may_move = frozenset[str]()  # settings that name files which a resumed run may find elsewhere

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        """Return the model, whose weights are not filled yet."""
        return Model(Architecture(run.model), kernels)

    def trained(self, run: RunConfig) -> Layout:
        """Return the layout of what is trained: gradients, moments and checkpoints have it."""
        return Architecture(run.model).layout

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Return what the files of a run say of it. Collective."""
        return Description(run, tokenizer)

    def begins_with(self, t: TrainConfig) -> str:
        """Return the file whose weights are trained further; "": first weights are drawn."""
        return t.init

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Load the weights that are read and not trained. Collective."""

    def use_of_init(self, t: TrainConfig) -> str:
        """Return what a new run does with the model that --init names, in words that follow its name."""
        return "is trained further"

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Refuse weights that a run of this kind cannot begin with; `resumed`: from a checkpoint."""
        if resumed and origin.untrainable:
            raise UsageError(f"{weights} is of a run that cannot be resumed: {origin.untrainable}")
        origin.refuse_training(t)
        if not resumed:
            origin.refuse_incomplete(weights)

    def refuse_moved(self, t: TrainConfig) -> None:
        """Refuse to resume where a file that the run needs is gone."""


WHOLE = ModelKind()


def not_finite(loss: float, norm: float) -> str:
    """Return what of a step is not finite, "" if all is."""
    for what, value in {"loss": loss, "gradient": norm}.items():
        if not math.isfinite(value):
            return f"the {what} is not finite"
    return ""


class Judge:
    """Says which steps may change the weights, and what follows where one may not. The same on all ranks.

    This one ends the run at the first step that is not finite.
    """

    # Whether its objection must be known before an update even where steps are queued. If not, `Step` gets no
    # `objection` there: kernels themselves leave out an update that is not finite.
    waits = False

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress

    def objection(self, loss: float, norm: float) -> str:
        """Return why a step must not change the weights, "" if it may."""
        return not_finite(loss, norm)

    def judge_step(self, done: Finished) -> str:
        """Return why a finished step has not changed the weights, "" if it has.

        Raises the error that ends the run, or a BadStep (run.py), by which the run recovers.
        """
        # None: nobody has judged the step before its update, since it was queued.
        reason = self.objection(done.loss, done.norm) if done.rejected is None else done.rejected
        if reason:
            bad = described(reason, self._progress.step + 1, done.loss, done.norm)
            raise shared(NonFiniteError(ending(bad, self._config)))
        return ""


def described(reason: str, step: int, loss: float, norm: float) -> str:
    """Return a line about a bad step."""
    return f"{reason} at step {step} (loss {loss}, gradient norm {norm})"


def ending(bad: str, config: TrainConfig) -> str:
    """Return the message of a run that ends at a bad step."""
    clip = "a smaller --clip" if config.clip else "--clip 1"
    hint = f"; a lower --lr, a longer --warmup or {clip} may help, or --on-bad-step skip"
    return f"{bad}{hint}; earlier checkpoints are kept"


@dataclass(frozen=True, slots=True)
class Times:
    """The moment from which this process counts, and what was used up by then."""

    begun: float  # of time.monotonic()
    spent: float  # seconds of the processes before this one


def is_over(seconds: float, t: TrainConfig) -> bool:
    """Return whether the time of a run that ends by the clock is over after this many seconds of it."""
    return seconds >= KEPT * 60 * t.train_minutes


class Clock:
    """Says which step is the last one. This one counts steps; `TimedClock` goes by the time."""

    def __init__(self, last: int | None, elapsed: float | None = None) -> None:
        self.last = last  # the last step; None: not known yet
        self.elapsed = elapsed  # the fraction of the run's time that is over; None: it has no time

    def seconds(self) -> float:
        """Return the seconds that count for the run's time."""
        return 0.0

    def elapsed_ahead(self) -> float:
        """Return the fraction of the time that is over with the next step, which rank 0 sends with a step."""
        return 0.0

    def hear_elapsed(self, elapsed: float, launched: int) -> None:
        """Go by what rank 0 has sent."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Votes of all ranks, summed with a step; the same on all ranks."""

    stop: signal.Signals | None  # the signal that counts most
    has_lost_disk: bool  # rank 0 cannot save any more, and must end the run
    elapsed: float  # fraction of the run's time, at the end of the next step


@dataclass(frozen=True, slots=True)
class Votes:
    """Collects this rank's votes, and reads the sums.

    Their number is fixed (`FLAG_COUNT`): one more would move the cuts of an Allreduce among three or more
    ranks, and with them the rounding of the gradients.
    """

    comm: Comm
    signals: PendingSignals
    disk: Disk
    clock: Clock

    def own_votes(self) -> list[float]:
        """Return this rank's votes: one for each signal, one for a lost disk, and rank 0's clock."""
        elapsed = self.clock.elapsed_ahead() if self.comm.rank == 0 else 0.0
        return [*self.signals.counts(), int(self.disk.lost is not None), elapsed]

    @staticmethod
    def read_votes(sums: Sequence[float], grad_sync: str) -> Heard:
        """Return what the sums of a step say. `grad_sync` names the exchange that has summed them."""
        *signals, disk, elapsed = sums
        if any(count < 0 or count % 1 for count in (*signals, disk)):
            raise DistgptError(
                f"--grad-sync {grad_sync} has mixed the ranks' votes with other numbers: do all ranks sum the"
                " same elements in each call?"
            )
        return Heard(first_of(signals), bool(disk), float(elapsed))


class Guard(AbstractContextManager[object], Protocol):
    """Watches a run from its first to its last step. It calls no collective and changes no step.

    It may ask that the run end, as a signal does.
    """

    def after_step(self, done: Finished) -> dict[str, float]:
        """Take note of a finished step. Return what to add to its metrics."""


@runtime_checkable
class StatefulGuard(Guard, Protocol):
    """A guard that checkpoints hold something of, as JSON: what rank 0 has."""

    def state(self) -> JsonObject: ...
    def load(self, state: JsonObject) -> None:
        """Continue from a checkpoint. On every rank."""


def guard_failed(guard: Guard, error: Exception) -> DistgptError:
    """Return an error that names the guard, and where in its file it failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the call itself
    where = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    name, what = (type(each).__qualname__ for each in (guard, error))
    return DistgptError(f"the guard {name} has failed: {what}: {error}{where}")


class Listener:
    """Shows or records the progress of a run, on rank 0 only. This one ignores it."""

    def started(self, facts: dict[str, Any]) -> None: ...
    def stepped(self, metrics: dict[str, float]) -> None: ...
    def evaluated(self, metrics: dict[str, float]) -> None: ...
    def noted(self, text: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class Disk:
    """The disk that weights are written to. `callbacks/full_disk.py` makes room on a full one."""

    lost: StorageError | None = None  # why rank 0 can save nothing any more, which ends the run

    def reserved(self, comm: Comm, step: int) -> AbstractContextManager[None]:
        """Hold room for the final weights meanwhile. Collective."""
        return nullcontext()

    def write(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        """Call write(), which writes this many bytes of this step. In any thread."""
        write()

    def write_final(self, step: int, n_bytes: int, write: Callable[[], object]) -> None:
        """Call write(), which writes the final weights."""
        write()

    def report(self) -> None:
        """Report what was done meanwhile. In the main thread."""

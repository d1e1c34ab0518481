"""Placement: which weights and moments a rank holds, and after which steps all ranks hold the same weights.

Plainly, every rank holds everything, and after each step all hold the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Model
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import Array
from distgpt.core.saved.checkpoint import load_group
from distgpt.core.saved.modelfile import fill
from distgpt.core.saved.tensors import Tensors

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # stems of a checkpoint's files
RECENT = 100  # steps whose duration counts

Groups = dict[str, Mapping[str, Array]]  # the stem of a checkpoint's file → its tensors


class Rounds:
    """Steps after which all ranks hold the same weights: plainly, each one."""

    length = 1

    def ends(self, done: int) -> bool:
        """Return whether all ranks hold the same weights after this many steps."""
        return True

    def before(self, done: int) -> int:
        """Return the step before this one after which all ranks last held the same weights."""
        return done - 1

    def recent(self, done: int, seconds: list[float]) -> list[float]:
        """Return those of the last steps, where `seconds` are of all steps up to `done`."""
        return seconds[-RECENT:]

    def usual(self, recent: Sequence[float]) -> float:
        """Return the seconds of a usual step."""
        return median(recent)

    def mean(self, first: int, seconds: Sequence[float]) -> float:
        """Return the mean seconds of a step, which no outlier moves. `first`: the steps before them."""
        return median(seconds)


class Gathering:
    """Brings to rank 0 what is to be saved: it has everything already."""

    has_all = True  # whether rank 0 can save without the others

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def groups(self, weights_alone: bool) -> Groups:
        """For rank 0: files of a checkpoint, or only of weights, in place of what this rank has of them."""
        return {}

    def on_root(self, act: Callable[[], Any]) -> Any:
        """Call act() on rank 0 as `agree.on_root` does, while `act` may use the tensors. Collective."""
        return on_root(self._comm, act)


class OptimizerState:
    """The weights and moments that one rank keeps: before the first step, and from and to a checkpoint."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer

    def load_weights(self, comm: Comm, read: Callable[[Tensors], None]) -> None:
        """Let rank 0 read weights, of which each rank gets what it keeps. Collective."""
        model = self.optimizer.model
        fill(comm, model, {"": model.weights}, read)

    def begin(self) -> None:
        """Bring moments into their state before the first step. The weights are there."""
        for moment in (self.optimizer.m, self.optimizer.v):
            self.optimizer.model.kernels.zero(moment.flat)

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        """Fill moments from a verified checkpoint, whose weights are there. Collective."""
        moments: dict[str, Any] = {"m/": self.optimizer.m, "v/": self.optimizer.v}
        fill(comm, self.optimizer.model, moments, partial(load_group, checkpoint, OPTIMIZER))

    def gathering(self, comm: Comm) -> Gathering:
        """Return what brings weights and moments to rank 0, which saves them."""
        return Gathering(comm)


class Placement:
    """Every rank holds all weights and moments. Made from the settings before model and clock."""

    name = "replicas"
    option = ""  # that asks for it
    may_copy = True  # whether rank 0 can save from a copy in its memory: it holds everything that is saved

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        self.rounds = Rounds()

    def own(self, layout: Layout, rank: int) -> slice | None:
        """Return the elements that a rank updates; None: all."""
        return None

    def state(self, model: Model, rank: int) -> OptimizerState:
        """Return the optimizer with this rank's moments."""
        return OptimizerState(self.optimizer(model, rank=rank, ranks=self.ranks))

    def optimizer(self, model: Model, own: slice | None = None, rank: int = 0, ranks: int = 1) -> AdamW:
        return OPTIMIZERS[self.config.optimizer](model, self.config, own, rank, ranks)

    def saved_buffers(self, is_common: bool) -> int:
        """Return how many buffers of the weights' size a checkpoint holds: weights and both moments.

        `is_common`: after a step that ends a round.
        """
        return 3

    def rehearse(self, model: Model) -> None:
        """Compile the loops by which weights are placed, with a small model."""

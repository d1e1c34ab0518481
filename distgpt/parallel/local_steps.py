"""Local steps: each rank trains on its own part of the batch, and after a round of steps all meet (DiLoCo).

A round begins with the same weights on all ranks. At its end all take one step of Nesterov momentum along the
mean of how far they have come. In between only a few numbers cross the network in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import FlatBuffer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import NesterovState
from distgpt.core.train.progress import Rounds
from distgpt.core.train.sharing import Exchange, Scales


class LocalSteps(Exchange):
    """Gradients stay with their rank. The changes of the weights are summed in the gradients' memory."""

    waits_after_update = True

    def __init__(
        self,
        name: str,
        comm: Comm,
        optimizer: AdamW,
        outer: Outer,
        rounds: Rounds,
        sum_changes: Callable[[int], None],
    ) -> None:
        """`name`: how `sum_changes` sums the gradients' memory over the ranks."""
        self.name, self.comm, self.rounds = name, comm, rounds
        self.optimizer, self.outer, self.sum_changes = optimizer, outer, sum_changes

    def sum_gradients(self, step: int) -> None:
        """Sum the squared norms alone: all ranks clip alike, and skip a step that one of them cannot use."""
        self.optimizer.compute_norm()
        self.sum_votes()

    def compute_norm(self, optimizer: AdamW) -> None:
        """Do nothing: `sum_gradients` has done it, since nobody may wait here while weights are locked."""

    def scales(self, counted: float) -> Scales:
        """Return the scales of a step: gradients are this rank's own, norm² is the mean over the ranks."""
        ranks = self.comm.size
        return Scales(1.0 / ranks / counted, 1.0 / counted, math.sqrt(1.0 / ranks) / counted)

    def sum_votes(self) -> None:
        """Sum the loss, the votes and the squared norm: in one message where they lie on the host."""
        extra, norm = self.optimizer.model.grads.flags, self.optimizer.norm
        if not isinstance(norm, np.ndarray):
            self.comm.sum(extra)
            self.comm.sum(norm)
            return
        both = np.concatenate([extra, norm])  # float64, as the norm is
        self.comm.sum(both)
        extra[:], norm[:] = both[: len(extra)], both[len(extra) :]

    def after_update(self, step: int, is_changed: bool) -> None:
        self.outer.in_sync = False
        if self.rounds.ends(step + 1):
            self.end_round(step + 1)

    def end_round(self, step: int) -> None:
        if self.outer.in_sync:
            return
        self.outer.store_change_as_gradient()
        self.sum_changes(step - 1)
        self.outer.step(self.comm.size)


class Outer:
    """Takes a step by Nesterov momentum along the mean change of weights that began a round alike."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self._model, self._config = model, config
        model.make_gradients()
        wide = model.kernels.wide_zeros
        self.round_start, self.velocity = (FlatBuffer(model.layout, wide) for _ in range(2))
        self.in_sync = True  # no rank has changed its weights since

    def begin(self) -> None:
        """Begin a first round with the weights as they are."""
        k = self._model.kernels
        k.zero(self.velocity.flat)
        k.put(self.round_start.flat, k.to_host(self._model.weights.flat))
        self.in_sync = True

    def store_change_as_gradient(self) -> None:
        """Gradients ← this rank's weights - those at the round's start."""
        model = self._model
        model.kernels.subtract(model.grads.flat, model.weights.flat, self.round_start.flat)

    def step(self, ranks: int) -> None:
        """Take the outer step once these changes are summed; the next round begins."""
        model, c = self._model, self._config
        low = None if model.params is model.weights else model.params.flat
        buffers = (self.round_start.flat, self.velocity.flat, model.grads.flat)
        state = NesterovState(model.weights.flat, low, *buffers)
        model.kernels.nesterov(state, 1 / ranks, c.outer_lr, c.outer_momentum)
        self.in_sync = True

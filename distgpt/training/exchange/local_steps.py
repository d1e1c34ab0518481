"""Local steps: each rank trains on its own part of the batch, and after a round of steps all meet (DiLoCo).

A round begins with the same weights on all ranks. At its end all take one step of Nesterov momentum along the
mean of how far they have come. In between only a few numbers cross the network in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import UsageError, refuse_beside
from distgpt.model.optim import AdamW
from distgpt.training.exchange.api import Exchange, Scales


class LocalSteps(Exchange):
    """Gradients stay with their rank. The changes of the weights are summed in the gradients' memory."""

    waits_after_update = True

    def __init__(
        self,
        name: str,
        comm: Comm,
        optimizer: AdamW,
        config: TrainConfig,
        sum_changes: Callable[[int], None],
    ) -> None:
        """`name`: how `sum_changes` sums the gradients' memory over the ranks."""
        assert optimizer.outer
        self.name, self.comm, self.config = name, comm, config
        self.optimizer, self.outer, self.sum_changes = optimizer, optimizer.outer, sum_changes

    def sum_gradients(self, step: int) -> None:
        """Sum the squared norms alone: all ranks clip alike, and skip a step that one of them cannot use."""
        self.optimizer.compute_norm()
        self.sum_flags()

    def compute_norm(self, optimizer: AdamW) -> None:
        """Do nothing: `sum_gradients` has done it, since nobody may wait here while weights are locked."""

    def scales(self, learned: float) -> Scales:
        """Return the scales of a step: gradients are this rank's own, norm² is the mean over the ranks."""
        ranks = self.comm.size
        return Scales(1.0 / ranks / learned, 1.0 / learned, math.sqrt(1.0 / ranks) / learned)

    def sum_flags(self) -> None:
        """Sum the loss, the flags and the squared norm: in one message where they lie on the host."""
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
        if ends_round(self.config, step + 1, self.comm.size):
            self.end_round(step + 1)

    def end_round(self, step: int) -> None:
        if self.outer.in_sync:
            return
        self.outer.store_change_as_gradient()
        self.sum_changes(step - 1)
        self.outer.step(self.comm.size)

    def waits(self) -> list[str]:
        return ["sum_flags", "sum_changes"]


def is_local(t: TrainConfig, ranks: int) -> bool:
    """Return whether ranks take steps of their own."""
    return t.outer_every > 0 and ranks > 1


def ends_round(t: TrainConfig, done: int, ranks: int) -> bool:
    """Return whether all ranks have the same weights after this many steps."""
    return not is_local(t, ranks) or done % t.outer_every == 0 or done == t.steps


def round_before(t: TrainConfig, done: int, ranks: int) -> int:
    """Return the step at which all ranks last had the same weights before this one."""
    return (done - 1) // t.outer_every * t.outer_every if is_local(t, ranks) else done - 1


def buffers_saved(t: TrainConfig, ranks: int, is_common: bool) -> int:
    """Return how many buffers of the weights' size a checkpoint holds.

    They are the weights and both moments; with local steps those of each rank, and the velocity.
    `is_common`: at the end of a round, where all ranks have the same weights.
    """
    if not is_local(t, ranks):
        return 3
    return 2 + 2 * ranks if is_common else 3 + 3 * ranks


def mean_of_round(t: TrainConfig, ranks: int, first: int, seconds: Sequence[float]) -> float:
    """Return a step's mean seconds, from the median of steps that end a round and that of the others.

    `first`: the steps that were done before those in `seconds`.
    """
    ends: list[float] = []
    others: list[float] = []
    for step, took in enumerate(seconds, first + 1):
        (ends if ends_round(t, step, ranks) else others).append(took)
    if not ends or not others:
        return median(seconds)
    return (median(ends) + (t.outer_every - 1) * median(others)) / t.outer_every


def check_local(t: TrainConfig) -> None:
    """Raise a UsageError about what needs the same weights on all ranks in every step."""
    what = f"--outer-every {t.outer_every}"
    if t.grad_sync in ("overlapped", "sharded"):
        raise UsageError(
            f"{what} goes with --grad-sync allreduce, chunked or hierarchical: {t.grad_sync} needs gradients "
            "of every step"
        )
    others = {"deterministic (reproducible parts)": t.reproducible_parts, "recheck-every": t.recheck_every}
    refuse_beside(what, others, "ranks have weights of their own")

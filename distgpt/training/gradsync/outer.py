"""Local steps: each rank trains on its own part of the batch, and after a round of steps all meet (DiLoCo).

A round begins with the same weights on all ranks. At its end all take one step of Nesterov momentum along the
mean of how far they have come. In between only a few numbers cross the network in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.errors import UsageError, refuse_beside
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Ready


@dataclass
class LocalSteps:
    """Gradients stay where they are; the weights' changes are exchanged in their memory."""

    name: str  # of what sums those changes
    comm: Comm
    model: Model
    optimizer: AdamW
    config: TrainConfig
    sum_changes: Callable[[int], None]  # over ranks, in the gradients' memory
    ready: Ready | None = None

    def begin(self, step: int) -> None:
        return None

    def finish(self, step: int) -> None:
        """Of the gradients only their norm: all clip alike, and all leave out a step that one cannot use."""
        self.optimizer.compute_norm()
        self.sum_numbers()

    def measure(self, optimizer: AdamW) -> None:
        """Done in `finish`: here the weights are at rest, and nobody may wait for other ranks."""

    def sum_numbers(self) -> None:
        """The loss, what ranks tell each other, and the norm: in one message where they lie on the host."""
        extra, norm = self.model.grads.flags, self.optimizer.norm
        if not isinstance(norm, np.ndarray):
            self.comm.sum(extra)
            self.comm.sum(norm)
            return
        both = np.concatenate([extra, norm])  # float64, as the norm is
        self.comm.sum(both)
        extra[:], norm[:] = both[: len(extra)], both[len(extra) :]

    def share(self, step: int, is_changed: bool) -> None:
        assert self.optimizer.outer
        self.optimizer.outer.in_sync = False
        if ends_round(self.config, step + 1, self.comm.size):
            self.end_round(step)

    def end_round(self, step: int) -> None:
        """The step that all ranks take together."""
        outer = self.optimizer.outer
        assert outer
        outer.store_change_as_gradient()
        self.sum_changes(step)
        outer.step(self.comm.size)


def is_local(t: TrainConfig, ranks: int) -> bool:
    """Whether ranks take steps of their own."""
    return t.outer_every > 0 and ranks > 1


def ends_round(t: TrainConfig, done: int, ranks: int) -> bool:
    """Whether all ranks have the same weights after so many steps."""
    return not is_local(t, ranks) or done % t.outer_every == 0 or done == t.steps


def round_before(t: TrainConfig, done: int, ranks: int) -> int:
    """After how many steps they had so before these."""
    return (done - 1) // t.outer_every * t.outer_every if is_local(t, ranks) else done - 1


def buffers_saved(t: TrainConfig, ranks: int, is_common: bool) -> int:
    """In a checkpoint: weights and both moments; with local steps those of each rank, and a velocity.

    `is_common`: at the end of a round, where all have the same weights, with which the next one begins.
    """
    if not is_local(t, ranks):
        return 3
    return 2 + 2 * ranks if is_common else 3 + 3 * ranks


def mean_of_round(t: TrainConfig, ranks: int, first: int, seconds: Sequence[float]) -> float:
    """Of a step, by the medians of steps that end a round and of the others; `first`: those done before."""
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
            f"{what} goes with --grad-sync packed, chunked or hierarchical: {t.grad_sync} needs gradients of"
            " every step"
        )
    others = {"deterministic (units)": t.units, "replay-every": t.replay_every}
    refuse_beside(what, others, "ranks have weights of their own")

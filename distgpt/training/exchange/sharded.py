"""Each rank sums, clips and updates a part of the weights, and holds the moments of that part (ZeRO 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.kernels.api import PIECE
from distgpt.model.memory import Layout
from distgpt.model.model import Model
from distgpt.model.muon import borders
from distgpt.model.optim import AdamW
from distgpt.training.exchange.api import Exchange
from distgpt.training.exchange.reductions import bounds_of


class Sharded(Exchange):
    """After the update, ranks give each other the weights that the passes read.

    Where these are rounded to bfloat16, the weights in full precision stay with their owner, as moments do.
    """

    name = "sharded"
    waits_after_update = True

    def __init__(
        self,
        comm: Comm,
        model: Model,
        bounds: Sequence[int],
        reduce: Callable[[Sequence[int], int], None],
        sum_flags: Callable[[], None],
        mean: float,
    ) -> None:
        """`bounds`: of the ranks' parts. `reduce(bounds, step)` gives this rank the sum of its part."""
        self.mean = mean
        self.comm, self.model, self._reduce, self._sum_flags = comm, model, reduce, sum_flags
        self._bounds = bounds
        self._pieces = model.kernels.scalars(-(-model.layout.size // PIECE))

    def sum_gradients(self, step: int) -> None:
        self._reduce(self._bounds, step)
        self._sum_flags()

    def compute_norm(self, optimizer: AdamW) -> None:
        """Add up the same pieces as a rank that has all gradients, so that the norm is the same number.

        With Muon a part may begin within a piece, and the norm differs by rounding.
        """
        k, own = self.model.kernels, optimizer.own
        k.zero(self._pieces)
        first, count = own.start // PIECE, -(-(own.stop - own.start) // PIECE)
        k.squares(self._pieces[first : first + count], self.model.grads.flat[own])
        self.comm.sum(self._pieces)
        k.add_up(optimizer.norm, self._pieces)

    def after_update(self, step: int, is_changed: bool) -> None:
        if is_changed:
            self.comm.all_gather(self.model.params.flat, self._bounds)

    def waits(self) -> list[str]:
        return ["sum_gradients", "after_update"]


def shards(t: TrainConfig, layout: Layout, ranks: int) -> list[int]:
    """Return where each rank's part of the flat buffers begins, and where the last one ends.

    Parts begin at multiples of the pieces whose squares make the norm, which is then the same for any parts;
    with Muon they have whole matrices.
    """
    if t.optimizer == "muon":
        return borders(layout, ranks, lambda spec: spec.size)
    return bounds_of(0, layout.size, ranks, PIECE)


def has_shards(t: TrainConfig, ranks: int) -> bool:
    """Return whether each rank has the moments of one part alone."""
    return t.grad_sync == "sharded" and ranks > 1


def own_shard(t: TrainConfig, layout: Layout, comm: Any) -> slice | None:
    """Return what this rank updates; None if that is everything."""
    if not has_shards(t, comm.size):
        return None
    bounds = shards(t, layout, comm.size)
    return slice(bounds[comm.rank], bounds[comm.rank + 1])

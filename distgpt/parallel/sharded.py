"""Sharding (ZeRO 1). Each rank sums, clips and updates a part of the weights, and has its moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Model
from distgpt.core.model.muon import borders
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import PIECE, Array
from distgpt.core.saved.tensors import Tensors
from distgpt.core.train.gathering import TensorByTensor, host_buffer, read_flat
from distgpt.core.train.parallel_strategy import (
    OPTIMIZER,
    WEIGHTS,
    GradientSync,
    Groups,
    OptimizerState,
    Placement,
    StateGatherer,
)
from distgpt.parallel.node_memory import bounds_of
from distgpt.parallel.reductions import in_parts, mean_factor, votes_sum

MASTER = "w/"  # prefix of full-precision weights, which have none in their file
PREFIXES = ("m/", "v/")


class Sharded(GradientSync):
    """After the update, ranks exchange the weights that the passes read.

    If these are rounded to bfloat16, the full-precision weights stay on their rank, as moments do.
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
        """`bounds` delimit the ranks' parts. `reduce(bounds, step)` gives this rank the sum of its part."""
        self.mean_factor = mean
        self.comm, self.model, self._reduce, self._sum_votes = comm, model, reduce, sum_flags
        self._bounds = bounds
        self._pieces = model.kernels.scalars(-(-model.layout.size // PIECE))

    def sum_gradients(self, step: int) -> None:
        self._reduce(self._bounds, step)
        self._sum_votes()

    def compute_norm(self, optimizer: AdamW) -> None:
        """Add the same pieces as a rank with all gradients, so that the norm is bitwise identical.

        With Muon a part may start within a piece, so the norm differs by rounding.
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


def make(comm: Comm, model: Model, t: TrainConfig) -> GradientSync:
    """Return the exchange of --grad-sync sharded."""
    nccl = comm.queued if t.gradient_dtype == "float32" else None
    reduce = (
        in_parts(model, t, comm, t.gradient_dtype).reduce
        if nccl is None
        else lambda bounds, step: nccl.reduce(model.grads.flat, bounds)
    )
    bounds = shards(t, model.layout, comm.size)
    return Sharded(comm, model, bounds, reduce, votes_sum(comm, model, t), mean_factor(comm, t))


def shards(t: TrainConfig, layout: Layout, ranks: int) -> list[int]:
    """Return the start of each rank's part of the flat buffers, and the end of the last one.

    Parts start at multiples of the pieces of the norm, so that the norm does not depend on the parts. With
    Muon, parts have whole matrices.
    """
    if t.optimizer == "muon":
        return borders(layout, ranks, lambda spec: spec.size)
    return bounds_of(0, layout.size, ranks, PIECE)


class ShardedPlacement(Placement):
    """Each rank has the moments of its part, and updates only this part in full precision."""

    option = "--grad-sync sharded"
    may_copy = False

    def own(self, layout: Layout, rank: int) -> slice:
        bounds = shards(self.config, layout, self.ranks)
        return slice(bounds[rank], bounds[rank + 1])

    def state(self, model: Model, rank: int) -> OptimizerState:
        # Unlike with complete moments on each rank, Muon has no work left to divide.
        return ShardedState(self.optimizer(model, self.own(model.layout, rank)))

    def warmup_pass(self, model: Model) -> None:
        k = model.kernels
        total = k.scalars(1)
        k.zero(total)  # used by `Sharded.compute_norm`
        k.sum_squares(total, model.params.flat)  # used by `is_finite`, since masters are divided


class ShardedState(OptimizerState):
    """The moments of one rank's part and, if weights are rounded, its full-precision weights."""

    def load_weights(self, comm: Comm, read: Callable[[Tensors], None]) -> None:
        model = self.optimizer.model
        if model.master_part is None:
            super().load_weights(comm, read)
            return
        host = host_buffer(model, model.layout)
        on_root(comm, lambda: read(dict(host)))
        comm.broadcast(host.flat)
        for name, values in host.items():
            model.put(name, values)

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        """Fill each rank's part from a verified checkpoint. Collective."""
        optimizer, model = self.optimizer, self.optimizer.model
        parts = (optimizer.m, optimizer.own), (optimizer.v, optimizer.v_own)
        for prefix, (moment, own) in zip(PREFIXES, parts, strict=True):
            through = read_flat(comm, model, checkpoint, OPTIMIZER, prefix, moment.layout)
            comm.broadcast(through)
            model.kernels.put(moment.flat, through[own])

    def gathering(self, comm: Comm) -> StateGatherer:
        return Shards(comm, self.optimizer)


class Part(NamedTuple):
    """A rank's elements `own` of a flat buffer, and the start of each rank's elements."""

    layout: Layout
    own: slice
    flat: Array
    bounds: list[int]


class Shards(TensorByTensor):
    """Moments and weights, each updated in parts by all ranks."""

    def __init__(self, comm: Comm, optimizer: AdamW) -> None:
        model, layout, second = optimizer.model, optimizer.model.layout, optimizer.v.layout
        self._to_host = model.kernels.to_host
        bounds = shards(optimizer.config, layout, comm.size)
        self._parts = {
            "m/": Part(layout, optimizer.own, optimizer.m.flat, bounds),
            "v/": Part(
                second, optimizer.v_own, optimizer.v.flat, [layout.position_in(second, at) for at in bounds]
            ),
            MASTER: Part(layout, optimizer.own, model.masters(optimizer.own), bounds),
        }
        self._specs = {
            prefix + spec.name: (prefix, spec)
            for prefix, part in self._parts.items()
            for spec in part.layout.specs
        }
        kind = optimizer.m.flat.dtype
        super().__init__(comm, {name: (kind, spec.shape) for name, (_, spec) in self._specs.items()})

    def groups(self, weights_alone: bool) -> Groups:
        moments = {name: name for name, (prefix, _) in self._specs.items() if prefix != MASTER}
        masters = {spec.name: MASTER + spec.name for spec in self._parts[MASTER].layout.specs}
        weights: Groups = {WEIGHTS: self.some(masters)}
        return weights if weights_alone else {OPTIMIZER: self.some(moments), **weights}

    def gathered(self, name: str) -> Array:
        prefix, spec = self._specs[name]
        layout, own, flat, bounds = self._parts[prefix]
        start = layout.offsets[spec.name]
        stop = start + spec.size
        whole = np.empty(spec.size, flat.dtype)
        a, b = max(start, own.start), min(stop, own.stop)
        if a < b:
            whole[a - start : b - start] = self._to_host(flat[a - own.start : b - own.start])
        self._comm.all_gather(whole, [min(max(bound, start), stop) - start for bound in bounds])
        return whole.reshape(spec.shape)

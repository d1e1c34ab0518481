"""Local steps: each rank has its own moments, and within a round its own weights. How they are saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import on_host
from distgpt.core.train.progress import Rounds
from distgpt.core.train.sharing import (
    OPTIMIZER,
    WEIGHTS,
    Exchange,
    Gathering,
    Groups,
    OptimizerState,
    Placement,
)
from distgpt.parallel.checkpointing import TensorByTensor, host_buffer, load_some, stems
from distgpt.parallel.local_steps import LocalSteps, Outer
from distgpt.parallel.reductions import reduction_for

OUTER = "outer"
MEAN = "mean/"


class LocalPlacement(Placement):
    """Each rank trains a model of its own for a round of steps."""

    may_copy = False

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        super().__init__(config, ranks)
        self.option = f"--outer-every {config.outer_every}"
        self.rounds = Rounds(config.outer_every, config.steps)

    def state(self, model: Model, rank: int) -> OptimizerState:
        # Ranks have gradients of their own: they share no work of the optimizer.
        return LocalState(self.optimizer(model), Outer(model, self.config), self.rounds)

    def saved_buffers(self, is_common: bool) -> int:
        """Return how many buffers a checkpoint holds: also those of each rank, and the velocity."""
        return 2 + 2 * self.ranks if is_common else 3 + 3 * self.ranks

    def rehearse(self, model: Model) -> None:
        outer = Outer(model, TrainConfig())
        outer.begin()
        outer.store_change_as_gradient()
        outer.step(1)


class LocalState(OptimizerState):
    """This rank's moments, and the outer optimizer, which is the same on all ranks."""

    def __init__(self, optimizer: AdamW, outer: Outer, rounds: Rounds) -> None:
        super().__init__(optimizer)
        self.outer, self.rounds = outer, rounds

    def begin(self) -> None:
        super().begin()
        self.outer.begin()

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        super().restore(comm, checkpoint)
        restore_replicas(comm, self.optimizer, self.outer, checkpoint)

    def gathering(self, comm: Comm) -> Gathering:
        return Replicas(comm, self.optimizer, self.outer)


def make(comm: Comm, state: OptimizerState, t: TrainConfig) -> Exchange:
    """Return the exchange of --outer-every. Collective."""
    assert isinstance(state, LocalState)
    model = state.optimizer.model
    changes = reduction_for(comm, model, t)
    sum_changes = partial(changes.sum, 0, model.layout.size)
    return LocalSteps(changes.name, comm, state.optimizer, state.outer, state.rounds, sum_changes)


class Replicas(TensorByTensor):
    """Local steps: each rank has its own moments, and within a round its own weights.

    Rank 0's moments are where they always are, and `weights` are the mean of those of the ranks, so that such
    a checkpoint is one like others. Beside them lie `outer`, with the velocity and, within a round, the
    weights with which it began; and `replica-N` with what rank N alone has.
    """

    def __init__(self, comm: Comm, optimizer: AdamW, outer: Outer) -> None:
        self._model, self._outer = optimizer.model, outer
        self._buffers = _buffers(optimizer)
        layout, wide = self._model.layout, np.dtype(self._model.kernels.wide)
        layouts = {MEAN: layout} | {
            f"{rank}/{prefix}": buffer.layout
            for rank in range(comm.size)
            for prefix, buffer in self._buffers.items()
        }
        specs = [(prefix, spec) for prefix, of in layouts.items() for spec in of.specs]
        self._places = {prefix + spec.name: (prefix, spec.name) for prefix, spec in specs}
        self._tensors = [spec.name for spec in layout.specs]
        super().__init__(comm, {prefix + spec.name: (wide, spec.shape) for prefix, spec in specs})

    def groups(self, weights_alone: bool) -> Groups:
        if weights_alone:  # of this rank
            return {}
        is_common, model = self._outer.in_sync, self._model
        velocity = on_host(model, self._outer.velocity, "velocity/")
        own = {prefix: on_host(model, buffer, prefix) for prefix, buffer in self._buffers.items()}
        groups: Groups = {OPTIMIZER: own["m/"] | own["v/"], OUTER: velocity}
        for rank in range(1, self._comm.size):
            kept = ("m/", "v/") if is_common else ("w/", "m/", "v/")
            names = [kind + name for kind in kept for name in self._tensors]
            groups[_file_of(rank)] = self.some({name: f"{rank}/{name}" for name in names})
        if not is_common:
            groups[WEIGHTS] = self.some({name: MEAN + name for name in self._tensors})
            groups[OUTER] = velocity | on_host(model, self._outer.round_start, "common/")
            groups[_file_of(0)] = own["w/"]
        return groups

    def gathered(self, name: str) -> Array:
        """On all ranks; a tensor that one of them has crosses the network once."""
        prefix, tensor = self._places[name]
        comm, to_host = self._comm, self._model.kernels.to_host
        if prefix == MEAN:
            total = np.array(to_host(self._model.weights[tensor]))
            comm.sum(total)
            total /= comm.size
            return total
        rank, _, kind = prefix.partition("/")
        array = to_host(self._buffers[kind][tensor])
        if comm.rank == 0:
            array = np.empty_like(array)
        comm.send(array, int(rank), 0)
        return array


def restore_replicas(comm: Comm, optimizer: AdamW, outer: Outer, checkpoint: Path) -> None:
    """Once all ranks have the checkpoint's weights, and rank 0's moments. Collective.

    On another number of ranks each takes the moments of one of those before, and within a round their mean
    weights. A checkpoint of steps that were not local begins a round.
    """
    outer.begin()
    saved = on_root(comm, lambda: sorted(stems(checkpoint)))
    if OUTER not in saved:
        return
    is_common = _file_of(0) not in saved
    replicas = next(rank for rank in range(1, len(saved) + 1) if _file_of(rank) not in saved)
    model, k = optimizer.model, optimizer.model.kernels

    def read(stem: str, prefix: str, layout: Layout) -> Array:
        host = host_buffer(model, layout)
        named = {prefix + name: array for name, array in host.items()}
        on_root(comm, partial(load_some, checkpoint, stem, named))
        return host.flat

    for prefix, buffer in (("velocity/", outer.velocity), ("common/", outer.round_start)):
        if prefix == "velocity/" or not is_common:
            flat = read(OUTER, prefix, model.layout)
            comm.broadcast(flat)
            k.put(buffer.flat, flat)
    buffers = _buffers(optimizer)
    if is_common or replicas != comm.size:
        del buffers["w/"]
    for rank in range(comm.size):
        for prefix, of in buffers.items():
            if rank % replicas or prefix == "w/":
                flat = read(_file_of(rank % replicas), prefix, of.layout)
                comm.send(flat, 0, rank)
                if comm.rank == rank:
                    k.put(of.flat, flat)
    outer.in_sync = is_common
    model.refresh()


def _buffers(optimizer: AdamW) -> dict[str, FlatBuffer]:
    """Return the buffers in which ranks differ, by the prefix of their tensors' names."""
    m, v = optimizer.m, optimizer.v
    assert isinstance(m, FlatBuffer) and isinstance(v, FlatBuffer)
    return {"w/": optimizer.model.weights, "m/": m, "v/": v}


def _file_of(rank: int) -> str:
    return f"replica-{rank:06d}"

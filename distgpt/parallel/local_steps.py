"""Local steps (DiLoCo). Each rank trains on its part of the batch, and all synchronize after each round.

A round starts with the same weights on all ranks. At its end all ranks take one step of Nesterov momentum
along their mean change of weights. In between, each step sends only a few numbers over the network.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np

from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import FlatBuffer
from distgpt.core.model.model import Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import Array, NesterovState
from distgpt.core.saved.modelfile import on_host
from distgpt.core.train.gathering import TensorByTensor, read_flat, stems
from distgpt.core.train.parallel_strategy import (
    OPTIMIZER,
    WEIGHTS,
    GradientSync,
    Groups,
    OptimizerState,
    Placement,
    Reduction,
    Scales,
    StateGatherer,
)
from distgpt.core.train.progress import Rounds
from distgpt.parallel.reductions import reduction_for


class LocalSteps(GradientSync):
    """Gradients stay on their rank. The changes of the weights are summed in the gradients' memory."""

    waits_after_update = True

    def __init__(self, comm: Comm, state: LocalState, changes: Reduction) -> None:
        self.name, self.comm, self.changes = changes.name, comm, changes
        self.state, self.optimizer = state, state.optimizer

    def sum_gradients(self, step: int) -> None:
        """Sum only the squared norms, so that all ranks clip identically and skip the same bad steps."""
        self.optimizer.compute_norm()
        self.sum_flags()

    def sum_flags(self) -> None:
        """Sum the loss, the step flags and the squared norm, in one message if they are on the host."""
        extra, norm = self.optimizer.model.grads.flags, self.optimizer.norm
        if not isinstance(norm, np.ndarray):
            self.comm.sum(extra)
            self.comm.sum(norm)
            return
        both = np.concatenate([extra, norm])  # float64, as the norm
        self.comm.sum(both)
        extra[:], norm[:] = both[: len(extra)], both[len(extra) :]

    def compute_norm(self, optimizer: AdamW) -> None:
        """Do nothing. `sum_gradients` has done it, since no rank may wait here while weights are locked."""

    def scales(self, counted: float) -> Scales:
        """Return the scales of a step. Gradients are this rank's; norm² is the mean over ranks."""
        ranks = self.comm.size
        return Scales(1.0 / ranks / counted, 1.0 / counted, math.sqrt(1.0 / ranks) / counted)

    def after_update(self, step: int, is_changed: bool) -> None:
        self.state.in_sync = False
        if self.state.rounds.ends(step + 1):
            self.end_round(step + 1)

    def end_round(self, step: int) -> None:
        if self.state.in_sync:
            return
        self.state.store_change_as_gradient()
        self.changes.sum(0, self.optimizer.model.layout.size, step - 1)
        self.state.end_round(self.comm.size)


# -- who holds what, and how it is saved


OUTER = "outer"
MEAN = "mean/"


class LocalPlacement(Placement):
    """Each rank trains a separate model for a round of steps."""

    may_copy = False

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        super().__init__(config, ranks)
        self.option = f"--outer-every {config.outer_every}"
        self.rounds = Rounds(config.outer_every, config.steps)

    def state(self, model: Model, rank: int) -> LocalState:
        # Ranks have different gradients, so they cannot share the optimizer's work.
        return LocalState(self.optimizer(model), self.config, self.rounds)

    def saved_buffers(self, is_common: bool) -> int:
        """Return the number of buffers in a checkpoint, including each rank's and the velocity."""
        return 2 + 2 * self.ranks if is_common else 3 + 3 * self.ranks

    def warmup_pass(self, model: Model) -> None:
        state = self.state(model, 0)
        state.begin()
        state.store_change_as_gradient()
        state.end_round(1)


class LocalState(OptimizerState):
    """This rank's moments, and the outer optimizer, which is the same on all ranks.

    The outer optimizer takes a step of Nesterov momentum along the mean change of weights in a round.
    """

    def __init__(self, optimizer: AdamW, config: TrainConfig, rounds: Rounds) -> None:
        super().__init__(optimizer)
        self._config, self.rounds, model = config, rounds, optimizer.model
        model.make_gradients()
        wide = model.kernels.accum_zeros
        self.round_start, self.velocity = (FlatBuffer(model.layout, wide) for _ in range(2))
        self.in_sync = True  # no rank has changed its weights since the last synchronization

    def begin(self) -> None:
        super().begin()
        self._begin_rounds()

    def _begin_rounds(self) -> None:
        """Start a first round with the current weights."""
        model = self.optimizer.model
        model.kernels.zero(self.velocity.flat)
        model.kernels.put(self.round_start.flat, model.kernels.to_host(model.weights.flat))
        self.in_sync = True

    def store_change_as_gradient(self) -> None:
        """Store this rank's weights minus the weights at the start of the round as gradients."""
        model = self.optimizer.model
        model.kernels.subtract(model.grads.flat, model.weights.flat, self.round_start.flat)

    def end_round(self, ranks: int) -> None:
        """Take the outer step after the changes are summed, and start the next round."""
        model, c = self.optimizer.model, self._config
        low = None if model.params is model.weights else model.params.flat
        buffers = (self.round_start.flat, self.velocity.flat, model.grads.flat)
        state = NesterovState(model.weights.flat, low, *buffers)
        model.kernels.nesterov(state, 1 / ranks, c.outer_lr, c.outer_momentum)
        self.in_sync = True

    def restore(self, comm: Comm, checkpoint: Path) -> None:
        """Restore, after all ranks have the checkpoint's weights, and rank 0's moments. Collective.

        On a different number of ranks, each takes the moments of an earlier rank and, within a round, the
        mean weights. A checkpoint without local steps starts a round.
        """
        super().restore(comm, checkpoint)
        self._begin_rounds()
        saved = on_root(comm, lambda: sorted(stems(checkpoint)))
        if OUTER not in saved:
            return
        is_common = _file_of(0) not in saved
        replicas = next(rank for rank in range(1, len(saved) + 1) if _file_of(rank) not in saved)
        model, k = self.optimizer.model, self.optimizer.model.kernels
        read = partial(read_flat, comm, model, checkpoint)
        for prefix, buffer in (("velocity/", self.velocity), ("common/", self.round_start)):
            if prefix == "velocity/" or not is_common:
                flat = read(OUTER, prefix, model.layout)
                comm.broadcast(flat)
                k.put(buffer.flat, flat)
        buffers = _buffers(self.optimizer)
        if is_common or replicas != comm.size:
            del buffers["w/"]
        for rank in range(comm.size):
            for prefix, of in buffers.items():
                if rank % replicas or prefix == "w/":
                    flat = read(_file_of(rank % replicas), prefix, of.layout)
                    comm.send(flat, 0, rank)
                    if comm.rank == rank:
                        k.put(of.flat, flat)
        self.in_sync = is_common
        model.refresh()

    def gathering(self, comm: Comm) -> StateGatherer:
        return Replicas(comm, self)


def make(comm: Comm, state: OptimizerState, t: TrainConfig) -> GradientSync:
    """Return the exchange of --outer-every. Collective."""
    assert isinstance(state, LocalState)
    return LocalSteps(comm, state, reduction_for(comm, state.optimizer.model, t))


class Replicas(TensorByTensor):
    """Checkpoints of local steps. Each rank has its own moments and, within a round, its own weights.

    Rank 0's moments are in the usual file, and `weights` has the mean over ranks, so that the checkpoint is
    also a usual one. The file `outer` has the velocity and, within a round, the weights at its start.
    `replica-N` has the values that only rank N has.
    """

    def __init__(self, comm: Comm, state: LocalState) -> None:
        self._model, self._state = state.optimizer.model, state
        self._buffers = _buffers(state.optimizer)
        layout, wide = self._model.layout, np.dtype(self._model.kernels.accum_dtype)
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
        if weights_alone:  # requested for this rank only
            return {}
        is_common, model = self._state.in_sync, self._model
        velocity = on_host(model, self._state.velocity, "velocity/")
        own = {prefix: on_host(model, buffer, prefix) for prefix, buffer in self._buffers.items()}
        groups: Groups = {OPTIMIZER: own["m/"] | own["v/"], OUTER: velocity}
        for rank in range(1, self._comm.size):
            kept = ("m/", "v/") if is_common else ("w/", "m/", "v/")
            names = [kind + name for kind in kept for name in self._tensors]
            groups[_file_of(rank)] = self.some({name: f"{rank}/{name}" for name in names})
        if not is_common:
            groups[WEIGHTS] = self.some({name: MEAN + name for name in self._tensors})
            groups[OUTER] = velocity | on_host(model, self._state.round_start, "common/")
            groups[_file_of(0)] = own["w/"]
        return groups

    def gathered(self, name: str) -> Array:
        """Runs on all ranks. A tensor of one rank is sent once."""
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


def _buffers(optimizer: AdamW) -> dict[str, FlatBuffer]:
    """Return the buffers that differ between ranks, by the prefix of their tensor names."""
    m, v = optimizer.m, optimizer.v
    assert isinstance(m, FlatBuffer) and isinstance(v, FlatBuffer)
    return {"w/": optimizer.model.weights, "m/": m, "v/": v}


def _file_of(rank: int) -> str:
    return f"replica-{rank:06d}"

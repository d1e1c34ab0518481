"""Checkpoints of ranks that take local steps: each has its own moments, and within a round its own weights.

Rank 0's moments are where they always are, and `weights` are the mean of those of the ranks, so that such a
checkpoint is one like others. Beside them lie `outer`, with the velocity and, within a round, the weights
with which it began; and `replica-N` with what rank N alone has.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.kernels.api import Array
from distgpt.model.memory import FlatBuffer, Layout
from distgpt.model.model import Model
from distgpt.model.optim import AdamW, Outer
from distgpt.saved.checkpoint import load_some, stems
from distgpt.saved.modelfile import on_host
from distgpt.training.exchange.checkpointing import OPTIMIZER, WEIGHTS, Gathering, Groups, host_buffer

OUTER = "outer"
MEAN = "mean/"


class Replicas(Gathering):
    """Asked for in a checkpoint's `groups`, which depend on whether the ranks' weights are the same now."""

    def __init__(self, comm: Comm, optimizer: AdamW, outer: Outer) -> None:
        self._model, self._outer = optimizer.model, outer
        self._buffers = _buffers(optimizer)
        layout, wide = self._model.layout, np.dtype(self._model.kernels.wide)
        layouts = {MEAN: layout} | {
            f"{rank}/{prefix}": buffer.layout
            for rank in range(comm.size)
            for prefix, buffer in self._buffers.items()
        }
        self._places, kinds = {}, {}
        for prefix, of in layouts.items():
            for spec in of.specs:
                self._places[prefix + spec.name] = prefix, spec.name
                kinds[prefix + spec.name] = wide, spec.shape
        self._tensors = [spec.name for spec in layout.specs]
        super().__init__(comm, kinds)

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


def restore_replicas(comm: Comm, model: Model, optimizer: AdamW, outer: Outer, checkpoint: Path) -> None:
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
    k = model.kernels

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

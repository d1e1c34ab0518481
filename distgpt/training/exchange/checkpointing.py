"""Moments and weights that differ between ranks, in files: rank 0 writes and reads them for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.kernels.api import Array
from distgpt.model.memory import FlatBuffer, Layout
from distgpt.model.model import Model
from distgpt.model.optim import AdamW, Outer, place_in
from distgpt.saved.checkpoint import load_some, stems
from distgpt.saved.modelfile import on_host
from distgpt.saved.tensors import Kind, LazyTensors
from distgpt.training.exchange.sharded import shards

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # stems of a checkpoint's files
DONE = -1
MASTER = "w/"  # of weights in full precision, which have no prefix in their file
PREFIXES = ("m/", "v/")
OUTER = "outer"
MEAN = "mean/"

Groups = dict[str, Mapping[str, Array]]  # the stem of a checkpoint's file → its tensors


class Gathering:
    """Rank 0 asks for tensors one by one, and the others answer, so that no rank has them all at once."""

    def __init__(self, comm: Comm, kinds: Mapping[str, Kind]) -> None:
        """`kinds`: of everything that rank 0 may ask for, by name."""
        self._comm, self._kinds, self._names = comm, kinds, list(kinds)
        self._numbers = {name: number for number, name in enumerate(kinds)}

    def groups(self, weights_alone: bool) -> Groups:
        """For rank 0: files of a checkpoint, or only of weights, in place of what this rank has of them."""
        raise NotImplementedError

    def gathered(self, name: str) -> Array:
        """The tensor of this name, for rank 0. Collective."""
        raise NotImplementedError

    def some(self, names: Mapping[str, str]) -> LazyTensors:
        """For rank 0: tensors by other names, made from these as they are used."""
        kinds = {name: self._kinds[own] for name, own in names.items()}
        return LazyTensors(kinds, lambda name: self._asked(names[name]))

    def on_root(self, act: Callable[[], Any]) -> Any:
        """Call act() on rank 0 as `agree.on_root` does, while `act` may use the tensors. Collective."""
        if self._comm.rank:
            while (number := self._told(0)) != DONE:
                self.gathered(self._names[number])
        return on_root(self._comm, lambda: self._closing(act))

    def _closing(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        finally:
            self._told(DONE)

    def _asked(self, name: str) -> Array:
        self._told(self._numbers[name])
        return self.gathered(name)

    def _told(self, number: int) -> int:
        message = np.array([number], np.int64)
        self._comm.broadcast(message)
        return int(message[0])


class Part(NamedTuple):
    """A rank's elements `own` of a flat buffer, and where each rank's elements of it begin."""

    layout: Layout
    own: slice
    flat: Array
    bounds: list[int]


class Shards(Gathering):
    """Moments and weights of which every rank keeps a part up to date."""

    def __init__(self, comm: Comm, optimizer: AdamW) -> None:
        model, layout, second = optimizer.model, optimizer.model.layout, optimizer.v.layout
        self._to_host = model.kernels.to_host
        bounds = shards(optimizer.config, layout, comm.size)
        self._parts = {
            "m/": Part(layout, optimizer.own, optimizer.m.flat, bounds),
            "v/": Part(
                second, optimizer.v_own, optimizer.v.flat, [place_in(second, layout, at) for at in bounds]
            ),
            MASTER: Part(layout, optimizer.own, model.precise(optimizer.own), bounds),
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
        """On all ranks."""
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


def restore_parts(comm: Comm, model: Model, optimizer: AdamW, checkpoint: Path) -> None:
    """Fill each rank's part from a verified checkpoint. Collective."""
    parts = (optimizer.m, optimizer.own), (optimizer.v, optimizer.v_own)
    for prefix, (moment, own) in zip(PREFIXES, parts, strict=True):
        through = host_buffer(model, moment.layout)
        named = {prefix + name: array for name, array in through.items()}
        on_root(comm, partial(load_some, checkpoint, OPTIMIZER, named))
        comm.broadcast(through.flat)
        model.kernels.put(moment.flat, through.flat[own])


def host_buffer(model: Model, layout: Layout) -> FlatBuffer:
    """Memory of the host for tensors no larger than the weights: that of the gradients, where it is there."""
    if model.kernels.capabilities.is_async:
        return FlatBuffer(layout, partial(np.zeros, dtype=model.kernels.wide))
    return model.grads if layout is model.layout else FlatBuffer(layout, lambda size: model.grads.flat[:size])


class Replicas(Gathering):
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

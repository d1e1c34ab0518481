"""Moments and weights of which each rank has a part, in files: rank 0 writes and reads them for all."""

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
from distgpt.model.optim import AdamW, place_in
from distgpt.saved.checkpoint import load_some
from distgpt.saved.tensors import Kind, LazyTensors
from distgpt.training.exchange.sharded import shards

WEIGHTS, OPTIMIZER = "weights", "optimizer"  # stems of a checkpoint's files
DONE = -1
MASTER = "w/"  # of weights in full precision, which have no prefix in their file
PREFIXES = ("m/", "v/")

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

"""Moments and weights of which each rank has a part, in files: rank 0 writes and reads them for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.kernels.api import Array
from distgpt.model.memory import FlatBuffer
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
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


class Shards(Gathering):
    """Moments and weights of which every rank keeps a part up to date."""

    def __init__(self, comm: Comm, optimizer: AdamW) -> None:
        model, self._own = optimizer.model, optimizer.own
        self._layout, self._to_host = model.layout, model.kernels.to_host
        self._parts = dict(zip(PREFIXES, (optimizer.m.flat, optimizer.v.flat), strict=True))
        self._parts[MASTER] = model.precise(self._own)
        self._bounds = shards(self._layout.size, comm.size)
        self._specs = {
            prefix + spec.name: (prefix, spec) for prefix in self._parts for spec in self._layout.specs
        }
        kind = optimizer.m.flat.dtype
        super().__init__(comm, {name: (kind, spec.shape) for name, (_, spec) in self._specs.items()})

    def groups(self, weights_alone: bool) -> Groups:
        moments = {name: name for name, (prefix, _) in self._specs.items() if prefix != MASTER}
        masters = {spec.name: MASTER + spec.name for spec in self._layout.specs}
        weights: Groups = {WEIGHTS: self.some(masters)}
        return weights if weights_alone else {OPTIMIZER: self.some(moments), **weights}

    def gathered(self, name: str) -> Array:
        """On all ranks."""
        prefix, spec = self._specs[name]
        start = self._layout.offsets[spec.name]
        stop = start + spec.size
        whole, own = np.empty(spec.size, self._parts[prefix].dtype), self._own
        a, b = max(start, own.start), min(stop, own.stop)
        if a < b:
            whole[a - start : b - start] = self._to_host(self._parts[prefix][a - own.start : b - own.start])
        self._comm.all_gather(whole, [min(max(bound, start), stop) - start for bound in self._bounds])
        return whole.reshape(spec.shape)


def restore_parts(comm: Comm, model: Model, optimizer: AdamW, checkpoint: Path) -> None:
    """Fill each rank's part from a verified checkpoint. Collective."""
    through, k = host_buffer(model), model.kernels
    for prefix, moment in zip(PREFIXES, (optimizer.m, optimizer.v), strict=True):
        named = {prefix + name: array for name, array in through.items()}
        on_root(comm, partial(load_some, checkpoint, OPTIMIZER, named))
        comm.broadcast(through.flat)
        k.put(moment.flat, through.flat[optimizer.own])


def host_buffer(model: Model) -> FlatBuffer:
    """Memory of the host for something of the size of all weights: the gradients', where that is there."""
    if model.kernels.capabilities.is_async:
        return FlatBuffer(model.layout, partial(np.zeros, dtype=model.kernels.wide))
    return model.grads

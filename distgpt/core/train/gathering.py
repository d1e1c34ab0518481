"""Collection of tensors from other ranks for saving, and their restoration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.comm.agree import broadcast, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.saved.checkpoint import check_file, read_manifest
from distgpt.core.saved.tensors import Kind, LazyTensors, Tensors, read_header, read_rows
from distgpt.core.train.parallel_strategy import GradientSync, Groups, StateGatherer

EXCHANGE = "exchange"  # the file of each rank's exchange state


def stems(checkpoint: Path) -> set[str]:
    """Return the stems of a checkpoint's tensor files, from its manifest."""
    return {Path(name).stem for name in read_manifest(checkpoint) if name.endswith(".safetensors")}


def load_some(checkpoint: Path, stem: str, destination: Tensors) -> None:
    """Fill `destination` from one file of a checkpoint. The file is verified as a whole."""
    file = checkpoint / f"{stem}.safetensors"
    check_file(checkpoint, file.name, read_manifest(checkpoint))
    header = read_header(file)
    for name, array in destination.items():
        if name not in header.tensors or header.tensors[name].shape != array.shape:
            raise DataError(f"{file} has no {name} of shape {array.shape}")
        read_rows(file, header, name, array)


class TensorByTensor(StateGatherer):
    """Rank 0 requests tensors one by one from the others, so that no rank holds all at a time."""

    has_all = False

    def __init__(self, comm: Comm, kinds: Mapping[str, Kind]) -> None:
        """`kinds`: types and shapes of all tensors that rank 0 may request, by name."""
        super().__init__(comm)
        self._kinds = kinds

    def gathered(self, name: str) -> Array:
        """Return the tensor of this name on rank 0. Collective."""
        raise NotImplementedError

    def some(self, names: Mapping[str, str]) -> LazyTensors:
        """On rank 0, return lazy tensors under other names: new name → gathered name."""
        kinds = {name: self._kinds[own] for name, own in names.items()}
        return LazyTensors(kinds, lambda name: self._asked(names[name]))

    def on_root(self, act: Callable[[], None]) -> None:
        if self._comm.rank:
            while name := broadcast(self._comm):
                self.gathered(name)
        on_root(self._comm, lambda: self._closing(act))

    def _closing(self, act: Callable[[], None]) -> None:
        try:
            act()
        finally:
            broadcast(self._comm, "")

    def _asked(self, name: str) -> Array:
        broadcast(self._comm, name)
        return self.gathered(name)


def host_buffer(model: Model, layout: Layout) -> FlatBuffer:
    """Return a host buffer of at most the weights' size. On CPUs, reuse the gradients' memory."""
    if model.kernels.capabilities.is_async:
        return FlatBuffer(layout, partial(np.zeros, dtype=model.kernels.accum_dtype))
    return model.grads if layout is model.layout else FlatBuffer(layout, lambda size: model.grads.flat[:size])


def read_flat(comm: Comm, model: Model, checkpoint: Path, stem: str, prefix: str, layout: Layout) -> Array:
    """Return a host array, which rank 0 fills from a file's tensors of a prefix. Collective."""
    host = host_buffer(model, layout)
    named = {prefix + name: array for name, array in host.items()}
    on_root(comm, partial(load_some, checkpoint, stem, named))
    return host.flat


class EachRank(TensorByTensor):
    """Each rank's exchange state. Rank 0 has everything else."""

    def __init__(self, comm: Comm, gradient_sync: GradientSync, model: Model) -> None:
        self._saved, self._to_host = gradient_sync.saved, model.kernels.to_host
        hosts = {name: self._to_host(array) for name, array in gradient_sync.saved.items()}
        kinds = {name: (host.dtype, host.shape) for name, host in hosts.items()}
        super().__init__(comm, {f"{rank}/{name}": kinds[name] for rank in range(comm.size) for name in kinds})

    def groups(self, weights_alone: bool) -> Groups:
        return {} if weights_alone else {EXCHANGE: self.some({name: name for name in self._kinds})}

    def gathered(self, name: str) -> Array:
        rank, _, own = name.partition("/")
        array = self._to_host(self._saved[own])
        if self._comm.rank == 0 and rank != "0":
            array = np.empty_like(array)
        self._comm.send(array, int(rank), 0)
        return array


def restore_gradient_sync(
    comm: Comm, gradient_sync: GradientSync, model: Model, checkpoint: Path | None
) -> str:
    """Restore an exchange's state, or zero it. Return a message if the checkpoint lacks it. Collective."""
    saved = on_root(comm, lambda: _saved_names(checkpoint)) if gradient_sync.saved else []
    is_same = saved == [f"{rank}/{name}" for rank in range(comm.size) for name in gradient_sync.saved]
    for rank in range(comm.size):
        for name, array in gradient_sync.saved.items():
            host = np.zeros_like(model.kernels.to_host(array))
            if checkpoint and is_same:
                on_root(comm, partial(load_some, checkpoint, EXCHANGE, {f"{rank}/{name}": host}))
                comm.send(host, 0, rank)
            if comm.rank == rank:
                model.kernels.put(array, host)
    if is_same or not checkpoint:
        return ""
    return f"{checkpoint} has no state of {type(gradient_sync).__name__} for these ranks; starting at zero"


def _saved_names(checkpoint: Path | None) -> list[str]:
    if checkpoint is None or EXCHANGE not in stems(checkpoint):
        return []
    return [*read_header(checkpoint / f"{EXCHANGE}.safetensors").tensors]

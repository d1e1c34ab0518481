"""Sums of a range of the gradients by messages, in parts or within nodes first; and the choice of a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import DTypeLike

from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import FlatBuffer, Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array, Wire
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.parallel_strategy import Allreduce, GradientSync, Reduction, SyncAfterBackward
from distgpt.parallel.node_memory import (
    LINE,
    Each,
    InParts,
    SharedGradients,
    SharedSum,
    bounds_of,
    one_by_one,
    spread,
)

PIECE = 1 << 20  # elements per exchange, so that they are still cached when they are summed


class HostWire:
    """Compiled loops on host memory. `each` runs them on `workers` workers."""

    def __init__(self, each: Each, workers: int) -> None:
        self._each, self._workers = each, workers
        self.piece = PIECE

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return np.zeros(shape, dtype)

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        from distgpt.parallel.loops import sums

        spread(len(out), self._each, self._workers, sums.dither, out, x, index, key)

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        from distgpt.parallel.loops import sums

        add = sums.add_tree if by_twos else sums.add_parts
        spread(len(total), self._each, self._workers, add, total, parts)

    def widen(self, out: Array, x: Array) -> None:
        from distgpt.parallel.loops import sums

        spread(len(out), self._each, self._workers, sums.widen, out, x)


class ReduceScatterGather(InParts):
    """Every rank sums one part of the range, in rank order or by twos, and sends the sum to all.

    `kind` is the type in which elements are sent: the buffer's own, or bfloat16. Rounding to bfloat16 is
    stochastic, so that errors cancel over steps and no rank has to store them.
    """

    def __init__(
        self,
        comm: Comm,
        flat: Array,
        kind: str,
        seed: int,
        wire: Wire,
        by_twos: bool = False,
    ) -> None:
        self._by_twos = by_twos
        self._comm, self._flat, self._seed, self._wire = comm, flat, seed, wire
        self._is_narrow = kind == "bfloat16" and flat.dtype != np.float64
        self._most = max(LINE, wire.piece // comm.size // LINE * LINE)  # elements per part and piece
        dtype = np.dtype(np.uint16) if self._is_narrow else flat.dtype
        self._received = wire.zeros((comm.size, self._most), dtype)
        self._travelling = wire.zeros((comm.size * self._most if self._is_narrow else 0,), dtype)

    def sum(self, start: int, stop: int, step: int) -> None:
        bounds = bounds_of(start, stop, self._comm.size)
        for pieces in self._pieces(bounds):
            self._reduce(pieces, step)
            if self._is_narrow:
                self._send(pieces, step)
        if not self._is_narrow:
            self.gather(bounds)

    def reduce(self, bounds: Sequence[int], step: int) -> None:
        for pieces in self._pieces(bounds):
            self._reduce(pieces, step)

    def gather(self, bounds: Sequence[int]) -> None:
        self._comm.all_gather(self._flat, bounds)

    def _pieces(self, bounds: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Cut all parts into pieces. Return (start, stop) by rank for the first pieces, the second, …"""
        longest = max(np.diff(bounds), default=0)
        return [
            [(min(a + at, b), min(a + at + self._most, b)) for a, b in pairwise(bounds)]
            for at in range(0, longest, self._most)
        ]

    def _reduce(self, pieces: list[tuple[int, int]], step: int) -> None:
        counts = [stop - start for start, stop in pieces]
        starts, sent = [start for start, _ in pieces], self._flat
        if self._is_narrow:
            sent, starts = self._travelling, [rank * self._most for rank in range(len(pieces))]
            for begin, (start, stop) in zip(starts, pieces, strict=True):
                self._narrow(sent[begin : begin + stop - start], start, step, 0)
        self._comm.all_to_all(self._received, sent, starts, counts)
        start, stop = pieces[self._comm.rank]
        self._wire.add_parts(self._flat[start:stop], self._received, self._by_twos)

    def _send(self, pieces: list[tuple[int, int]], step: int) -> None:
        """Send each rank's piece to all, rounded on every rank, including its own."""
        ends = np.cumsum([0, *(stop - start for start, stop in pieces)]).tolist()
        rank, flying = self._comm.rank, self._travelling
        self._narrow(flying[ends[rank] : ends[rank + 1]], pieces[rank][0], step, 1)
        self._comm.all_gather(flying, ends)
        for begin, (start, stop) in zip(ends, pieces, strict=False):
            self._wire.widen(self._flat[start:stop], flying[begin : begin + stop - start])

    def _narrow(self, out: Array, start: int, step: int, time: int) -> None:
        key = crc32(f"{self._seed} {step} {self._comm.rank} {time}".encode())
        self._wire.dither(out, self._flat[start : start + len(out)], start, key)


class Hierarchical(Reduction):
    """Sums each part within the node, then across nodes, and distributes it, for less network traffic."""

    name = "hierarchical"

    def __init__(self, comm: Comm, node: InParts, across: Reduction) -> None:
        """`comm`: the ranks of the node."""
        self._comm, self._node, self._across = comm, node, across

    def sum(self, start: int, stop: int, step: int) -> None:
        bounds, rank = bounds_of(start, stop, self._comm.size), self._comm.rank
        self._node.reduce(bounds, step)
        self._across.sum(bounds[rank], bounds[rank + 1], step)
        self._node.gather(bounds)


# Choice of a reduction by the settings


def make(comm: Comm, model: Model, t: TrainConfig) -> GradientSync:
    """Return the exchange of --grad-sync allreduce. Collective."""
    mean = mean_factor(comm, t)
    reduction = reduction_for(comm, model, t)
    if isinstance(reduction, SharedSum | Allreduce):  # loss and step flags are summed with the gradients
        return SyncAfterBackward(reduction.name, reduction, len(model.grads.with_flags), lambda: None, mean)
    return SyncAfterBackward(reduction.name, reduction, model.layout.size, votes_sum(comm, model, t), mean)


def reduction_for(comm: Comm, model: Model, t: TrainConfig) -> Reduction:
    """Return the reduction of the gradients after the backward pass. Collective."""
    wire, grads, k = t.gradient_dtype, model.grads, model.kernels
    in_memory = None  # factory of a sum over the ranks of a node
    if isinstance(grads, SharedGradients):
        by_twos = bool(t.reproducible_parts)
        in_memory = partial(SharedSum, rows=grads.rows, each=k.each, workers=k.threads, by_twos=by_twos)
    if not (k.capabilities.is_async or t.reproducible_parts):
        parts = partial(in_parts, model, t)
        if by_node := hierarchical(comm, grads.flat, wire, parts, in_memory):
            return by_node
    if in_memory and wire == "float32" and comm.size == comm.local_size:
        return in_memory(comm)
    if wire == "float32" and not t.reproducible_parts:
        return Allreduce(comm, grads.with_flags)
    return in_parts(model, t, comm, wire)


def hierarchical(
    comm: Comm,
    flat: Array,
    wire: str,
    parts: Callable[[Comm, str], InParts],
    in_memory: Callable[[Comm], SharedSum] | None = None,
) -> Hierarchical | None:
    """Return a sum within nodes first, or None if `Comm.split_by_node` is of no use. Collective."""
    levels = comm.split_by_node()
    if levels is None:
        return None
    node, peers = levels
    across = parts(peers, wire) if wire != "float32" else Allreduce(peers, flat)
    return Hierarchical(node, in_memory(node) if in_memory else parts(node, "float32"), across)


def in_parts(model: Model, t: TrainConfig, comm: Comm, wire: str) -> ReduceScatterGather:
    """Return a reduction in parts, with the loops of the device that has the gradients."""
    k = model.kernels
    loops = k.wire or HostWire(k.each, k.threads)
    return ReduceScatterGather(
        comm, model.grads.flat, wire, t.seed, loops, by_twos=bool(t.reproducible_parts)
    )


def votes_sum(comm: Comm, model: Model, t: TrainConfig) -> Callable[[], None]:
    """Return a function that sums the numbers appended to the gradients in a separate call."""
    extra = model.grads.flags

    def sum_flags() -> None:
        if t.reproducible_parts:
            tree_sum(comm, extra[:1])
        comm.sum(extra[1:] if t.reproducible_parts else extra)

    return sum_flags


def tree_sum(comm: Comm, value: Array) -> None:
    """Replace value (1,) by its sum over ranks, in the same tree. Collective."""
    every = np.zeros(comm.size, value.dtype)
    every[comm.rank] = value[0]
    comm.sum(every)  # exact: a sum of one number and zeros
    while len(every) > 1:
        every = every[::2] + every[1::2]
    value[0] = every[0]


def mean_factor(comm: Comm, t: TrainConfig) -> float:
    """Return the factor from the ranks' sum to the mean. Reproducible parts are already weighted."""
    return 1.0 if t.reproducible_parts else 1.0 / comm.size


def rehearse_reductions(kernels: Kernels, wire: str) -> None:
    """Compile every loop that a reduction in parts may call."""
    grads = FlatBuffer(Layout([Spec("w", (LINE,))]), kernels.accum_zeros, flags=1)
    for by_twos in (False, True):
        loops = HostWire(one_by_one, 1)
        ReduceScatterGather(SerialComm(), grads.flat, wire, 0, loops, by_twos).sum(0, LINE, 0)

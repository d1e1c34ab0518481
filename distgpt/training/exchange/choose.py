"""From the settings to the exchange that a step calls; `auto` tries several in the first steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import TrainConfig
from distgpt.errors import Say
from distgpt.formatting import duration
from distgpt.kernels.api import Array, Kernels
from distgpt.model.memory import FlatBuffer, Layout, Spec
from distgpt.model.model import Model
from distgpt.model.muon import OPTIMIZERS
from distgpt.model.optim import AdamW, Outer
from distgpt.training.exchange.api import AfterBackward, Exchange
from distgpt.training.exchange.local_steps import LocalSteps, is_local
from distgpt.training.exchange.overlapped import Overlapped, OverlappedNccl
from distgpt.training.exchange.reductions import (
    LINE,
    Allreduce,
    Hierarchical,
    HostWire,
    ReduceScatterGather,
    Reduction,
)
from distgpt.training.exchange.reproducible import Tree, tree_sum
from distgpt.training.exchange.sharded import Sharded, has_shards, own_shard, shards

BY_TRIAL = "auto"
ONE_CALL = ("allreduce", "chunked")  # these send everything as it lies in memory, the loss with it
WARM_UP = 2  # steps of each that do not count: on a GPU one compiles, and the next one records
EACH = 3  # steps of each that count, of which the fastest counts: a save may come between two


def make_exchange(comm: Comm, optimizer: AdamW, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange that `t` asks for. `say` gets what --grad-sync auto has chosen. Collective."""
    model = optimizer.model
    if comm.size == 1:
        return Exchange()
    if is_local(t, comm.size):
        name = (
            _best_of_a_round(comm, model.kernels.capabilities.is_async)
            if t.grad_sync == BY_TRIAL
            else t.grad_sync
        )
        changes = _reduction(comm, model, replace(t, grad_sync=name))
        return LocalSteps(name, comm, optimizer, t, partial(changes.sum, 0, model.layout.size))
    if t.grad_sync == BY_TRIAL:
        return _fastest(comm, optimizer, t, say)
    return EXCHANGES[t.grad_sync](comm, model, t)


def _after_backward(comm: Comm, model: Model, t: TrainConfig) -> Exchange:
    in_one_call = t.gradient_dtype == "float32" and t.grad_sync in ONE_CALL and not t.reproducible_parts
    if in_one_call:  # with the loss and flags
        whole = model.grads.with_flags
        return AfterBackward(
            t.grad_sync, Allreduce(comm, whole, t.grad_sync == "chunked"), len(whole), lambda: None
        )
    reduction, size = _reduction(comm, model, t), model.layout.size
    return AfterBackward(t.grad_sync, reduction, size, _sum_flags(comm, model, t))


def _overlapped(comm: Comm, model: Model, t: TrainConfig) -> Exchange:
    sum_flags, size = _sum_flags(comm, model, t), model.layout.size
    if model.kernels.capabilities.is_async:
        assert comm.nccl
        return OverlappedNccl(size, comm.nccl, _flat(comm, model, t), model.kernels.between, sum_flags)
    parts = partial(_in_a_thread, model, t)
    reduction = fastest_between_nodes(comm.dup_sleeping(), model.grads.flat, t.gradient_dtype, parts)
    return Overlapped(size, reduction, sum_flags)


def _sharded(comm: Comm, model: Model, t: TrainConfig) -> Exchange:
    nccl = comm.nccl if t.gradient_dtype == "float32" else None
    reduce = (
        _parts(model, t, comm, t.gradient_dtype).reduce
        if nccl is None
        else lambda bounds, step: nccl.reduce(model.grads.flat, bounds)
    )
    bounds = shards(t, model.layout, comm.size)
    return Sharded(comm, model, bounds, reduce, _sum_flags(comm, model, t))


EXCHANGES: dict[str, Callable[[Comm, Model, TrainConfig], Exchange]] = {
    "allreduce": _after_backward,
    "chunked": _after_backward,
    "hierarchical": _after_backward,
    "overlapped": _overlapped,
    "sharded": _sharded,
}


def _fastest(comm: Comm, optimizer: AdamW, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange that tries all candidates, or the only candidate. Collective."""
    k = optimizer.model.kernels
    names = candidates(comm, t, k.capabilities.is_async)

    def make(name: str) -> Exchange:
        return EXCHANGES[name](comm, optimizer.model, replace(t, grad_sync=name))

    if len(names) > 1:
        return Auto(comm, names, make, say, wait=lambda: k.to_host(optimizer.norm))
    say(f"--grad-sync auto: {names[0]}, the only way to try here")
    return make(names[0])


class Auto(Exchange):
    """Uses one of several exchanges, which sum alike up to rounding. All ranks use the same at every step."""

    def __init__(
        self,
        comm: Comm,
        names: Sequence[str],
        make: Callable[[str], Exchange],
        say: Say,
        wait: Callable[[], None],
    ) -> None:
        """`wait` returns when all that was queued is done."""
        self._comm, self._say, self._wait = comm, say, wait
        self._exchanges = {name: make(name) for name in names}
        self._to_try = list(names) * (WARM_UP + EACH)
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self._name, self._begun, self._steps = names[0], 0.0, 0
        self.name = "auto"
        self.is_settled = False

    def before_backward(self, step: int) -> None:
        if not self.is_settled:
            self._next()
        self._current.before_backward(step)
        self.ready = self._current.ready

    def sum_gradients(self, step: int) -> None:
        self._current.sum_gradients(step)

    @property
    def _current(self) -> Exchange:
        return self._exchanges[self._name]

    def _next(self) -> None:
        """Take the time of the step that has just ended, and another exchange for the next one."""
        self._wait()
        now = time.perf_counter()
        if self._steps > len(self._seconds) * WARM_UP:
            self._seconds[self._name].append(now - self._begun)
        if self._steps < len(self._to_try):
            self._name, self._begun = self._to_try[self._steps], now
            self._steps += 1
            return
        best = {name: min(seconds) for name, seconds in self._seconds.items()}
        self._name, line = on_root(self._comm, lambda: self._pick_fastest(best))
        self.name = self._name
        self._exchanges = {self._name: self._exchanges[self._name]}
        self.is_settled = True
        self._say(line)

    def _pick_fastest(self, best: dict[str, float]) -> tuple[str, str]:
        """Return the name of the fastest by rank 0's clock, and a line that says so."""
        name = min(best, key=lambda name: best[name])
        others = ", ".join(f"{other} {duration(seconds)}" for other, seconds in best.items() if other != name)
        return name, f"--grad-sync {name} is the fastest here: {duration(best[name])} a step ({others})"


def candidates(comm: Comm, t: TrainConfig, on_gpu: bool) -> list[str]:
    """Return what may be the fastest, by how the ranks lie on nodes. Collective."""
    most, has_threads = comm.allreduce_max(comm.local_size), not comm.allreduce_max(not comm.threads)
    if t.reproducible_parts or (on_gpu and comm.lacks_alltoall):
        return ["allreduce"]
    if on_gpu and comm.nccl:
        return ["allreduce", "overlapped"]
    if on_gpu and t.gradient_dtype != "float32":
        return ["allreduce"]
    if on_gpu or most == comm.size:
        return ["allreduce", "chunked"]
    return ["allreduce", *["overlapped"] * has_threads, *["hierarchical"] * (most > 1)]


def _best_of_a_round(comm: Comm, on_gpu: bool) -> str:
    """Return a choice for local steps, whose exchanges are too rare to time. Collective."""
    if on_gpu:
        return "allreduce"
    most = comm.allreduce_max(comm.local_size)
    return "chunked" if most == comm.size else "hierarchical" if most > 1 else "allreduce"


def _reduction(comm: Comm, model: Model, t: TrainConfig) -> Reduction:
    """Return what sums the gradients, without the numbers appended to them. Collective."""
    if t.grad_sync == "hierarchical":
        return fastest_between_nodes(comm, model.grads.flat, t.gradient_dtype, partial(_parts, model, t))
    return _flat(comm, model, t)


def _flat(comm: Comm, model: Model, t: TrainConfig) -> Reduction:
    """Return a reduction over all ranks alike, wherever they are."""
    if t.gradient_dtype == "float32" and not t.reproducible_parts:
        return Allreduce(comm, model.grads.flat, t.grad_sync == "chunked")
    return _parts(model, t, comm, t.gradient_dtype)


def fastest_between_nodes(
    comm: Comm, flat: Array, wire: str, parts: Callable[[Comm, str], ReduceScatterGather]
) -> Reduction:
    """Return a reduction that sends little between nodes. Collective."""

    def across(comm: Comm) -> Reduction:
        return parts(comm, wire) if wire != "float32" else Allreduce(comm, flat)

    levels = comm.split_by_node()
    if levels is None:  # chunked: what stays in a cache is summed faster within a node
        is_one_node = comm.size == comm.local_size
        return Allreduce(comm, flat, chunked=True) if is_one_node and wire == "float32" else across(comm)
    node, peers = levels
    return Hierarchical(node, flat, parts(node, "float32"), across(peers))


def _parts(model: Model, t: TrainConfig, comm: Comm, wire: str) -> ReduceScatterGather:
    k = model.kernels
    loops = k.wire or HostWire(k.each, k.threads)
    return ReduceScatterGather(
        comm, model.grads.flat, wire, t.seed, loops, by_twos=bool(t.reproducible_parts)
    )


def _in_a_thread(model: Model, t: TrainConfig, comm: Comm, wire: str) -> ReduceScatterGather:
    """Return what a thread beside the workers calls, without them."""
    return ReduceScatterGather(comm, model.grads.flat, wire, t.seed, HostWire(one_by_one, 1))


def _sum_flags(comm: Comm, model: Model, t: TrainConfig) -> Callable[[], None]:
    """Return what sums the numbers appended to the gradients in a call of their own."""
    extra = model.grads.flags

    def sum_flags() -> None:
        if t.reproducible_parts:
            tree_sum(comm, extra[:1])
        comm.sum(extra[1:] if t.reproducible_parts else extra)

    return sum_flags


def one_by_one(work: Callable[[int], Any], count: int) -> None:
    """Do the same as `Kernels.each`, in the calling thread."""
    for part in range(count):
        work(part)


# What else the settings decide


def optimizer_for(model: Model, t: TrainConfig, comm: Comm) -> AdamW:
    """Return the optimizer with this rank's part of the moments, and what local steps need."""
    outer = Outer(model, t) if is_local(t, comm.size) else None
    own = own_shard(t, model.layout, comm)
    # Nothing to divide where a rank has a part of its own, or gradients of its own.
    place = (0, 1) if own or outer else (comm.rank, comm.size)
    return OPTIMIZERS[t.optimizer](model, t, own, outer, *place)


def parts_made(t: TrainConfig, ranks: int) -> int:
    """Return how many `ReduceScatterGather` a rank may have on a GPU at once; with NCCL it may have fewer."""
    if ranks == 1 or (t.gradient_dtype == "float32" and not t.reproducible_parts):
        return int(has_shards(t, ranks))
    return 2 if t.grad_sync == BY_TRIAL and not is_local(t, ranks) else 1


def rehearse_exchange(kernels: Kernels, wire: str) -> None:
    """Compile every loop that an exchange may call."""
    grads = FlatBuffer(Layout([Spec("w", (LINE,))]), kernels.wide_zeros, flags=1)
    for by_twos in (False, True):
        ReduceScatterGather(SerialComm(), grads.flat, wire, 0, HostWire(one_by_one, 1), by_twos).sum(
            0, LINE, 0
        )
    Tree(grads, kernels, 1).add(0)

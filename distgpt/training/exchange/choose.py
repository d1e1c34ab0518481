"""From the settings to the exchange that a step calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import TrainConfig
from distgpt.errors import Say
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
from distgpt.training.exchange.trial import Trial, candidates

BY_TRIAL = "auto"
ONE_CALL = ("allreduce", "chunked")  # these send everything as it lies in memory, the loss with it


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
        reduction: Reduction = Allreduce(comm, whole, t.grad_sync == "chunked")
        return AfterBackward(t.grad_sync, reduction, len(whole), lambda: None, 1.0 / comm.size)
    reduction, size = _reduction(comm, model, t), model.layout.size
    return AfterBackward(t.grad_sync, reduction, size, _sum_flags(comm, model, t), _mean(comm, t))


def _overlapped(comm: Comm, model: Model, t: TrainConfig) -> Exchange:
    sum_flags, size = _sum_flags(comm, model, t), model.layout.size
    if model.kernels.capabilities.is_async:
        assert comm.nccl
        flat, between = _flat(comm, model, t), model.kernels.between
        return OverlappedNccl(size, comm.nccl, flat, between, sum_flags, 1.0 / comm.size)
    parts = partial(_in_a_thread, model, t)
    reduction = fastest_between_nodes(comm.dup_sleeping(), model.grads.flat, t.gradient_dtype, parts)
    return Overlapped(size, reduction, sum_flags, 1.0 / comm.size)


def _sharded(comm: Comm, model: Model, t: TrainConfig) -> Exchange:
    nccl = comm.nccl if t.gradient_dtype == "float32" else None
    reduce = (
        _parts(model, t, comm, t.gradient_dtype).reduce
        if nccl is None
        else lambda bounds, step: nccl.reduce(model.grads.flat, bounds)
    )
    bounds = shards(t, model.layout, comm.size)
    return Sharded(comm, model, bounds, reduce, _sum_flags(comm, model, t), _mean(comm, t))


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
        return Trial(comm, names, make, say, wait=lambda: k.to_host(optimizer.norm))
    say(f"--grad-sync auto: {names[0]}, the only way to try here")
    return make(names[0])


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


def _mean(comm: Comm, t: TrainConfig) -> float:
    """Return the factor that makes a mean of the ranks' sum: reproducible parts have their weight already."""
    return 1.0 if t.reproducible_parts else 1.0 / comm.size


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

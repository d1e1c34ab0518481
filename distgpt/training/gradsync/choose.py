"""From the settings to what a step calls about other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distgpt.comm.agree import refuse_anywhere
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import TrainConfig
from distgpt.data.batches import refuse_uneven
from distgpt.errors import Say, UsageError
from distgpt.kernels.api import Array, Kernels
from distgpt.model.memory import FlatBuffer, Layout, Spec
from distgpt.model.model import Model
from distgpt.model.optim import AdamW, Outer
from distgpt.training.balance import check_balance
from distgpt.training.gradsync.auto import Auto
from distgpt.training.gradsync.outer import LocalSteps, check_local, is_local
from distgpt.training.gradsync.schedules import (
    AtTheEnd,
    Beside,
    GradSync,
    Overlapped,
    Sharded,
    has_shards,
    own_shard,
)
from distgpt.training.gradsync.units import Tree, check_units, tree_sum
from distgpt.training.gradsync.ways import LINE, HostWire, Levels, OneCall, Owner, Parts, Way

MakeParts = Callable[[Comm, str], Parts]
BY_TRIAL = "auto"
WITHOUT_THREADS = (
    "--grad-sync overlapped needs an MPI with MPI_THREAD_MULTIPLE, which this one does not grant"
)
WITHOUT_NCCL = (
    "--grad-sync overlapped on GPUs needs NCCL (pip install nvidia-nccl-cu13, or -cu12), a GPU for every rank"
    " and --allreduce auto or nccl"
)
ONLY_SUMS = (
    "--allreduce cuda-aware is for --grad-sync packed and chunked with --wire float32: use nccl or host"
)
ONE_CALL = ("packed", "chunked")  # these send everything as it lies in memory, the loss with it


def optimizer_for(model: Model, t: TrainConfig, comm: Comm) -> AdamW:
    """With what this rank has of the moments, and what local steps need."""
    outer = Outer(model, t) if is_local(t, comm.size) else None
    return AdamW(model, t, own_shard(t, model.layout.size, comm), outer)


def grad_sync(comm: Comm, optimizer: AdamW, t: TrainConfig, say: Say) -> GradSync:
    """What `t` asks for; `say` is called with what auto has come to. Collective, as calls of it are."""
    model = optimizer.model
    if is_local(t, comm.size):
        name = (
            _best_at_the_end(comm, model.kernels.capabilities.is_async)
            if t.grad_sync == BY_TRIAL
            else t.grad_sync
        )
        changes = _sum_of_gradients(comm, model, replace(t, grad_sync=name))
        return LocalSteps(name, comm, model, optimizer, t, partial(changes.sum, 0, model.layout.size))
    if t.grad_sync != BY_TRIAL:
        return _of_name(comm, model, t)
    k = model.kernels
    names, why = candidates(comm, t, k.capabilities.is_async)
    if len(names) == 1:
        if why:
            say(f"--grad-sync auto: {names[0]}, the only way to try {why}")
        return _of_name(comm, model, replace(t, grad_sync=names[0]))

    def wait() -> None:
        k.to_host(optimizer.norm)

    def make(name: str) -> AtTheEnd:
        return _for_all(comm, model, replace(t, grad_sync=name))

    return Auto(comm, names, make, say, wait)


def _best_at_the_end(comm: Comm, on_gpu: bool) -> str:
    """Where there is nothing to try, since it comes once in many steps. Collective."""
    if on_gpu:
        return "packed"
    most = comm.largest(comm.local_size)
    return "chunked" if most == comm.size else "hierarchical" if most > 1 else "packed"


def candidates(comm: Comm, t: TrainConfig, on_gpu: bool) -> tuple[list[str], str]:
    """Ways that may be the fastest, by how the ranks lie on nodes; of a single one, why. Collective."""
    most, has_threads = comm.largest(comm.local_size), not comm.largest(not comm.threads)
    if comm.size == 1:
        return ["packed"], ""
    if t.units:
        return ["packed"], "with --units"
    if on_gpu and comm.only_sums:
        return ["packed"], "with --allreduce cuda-aware"
    if on_gpu and comm.direct:
        return ["packed", "overlapped"], ""
    if on_gpu and t.wire != "float32":
        return ["packed"], f"with --wire {t.wire} and without NCCL"
    if on_gpu:
        return ["packed", "chunked"], ""
    if most == comm.size:
        return ["packed", "chunked"], ""
    others = [*["overlapped"] * has_threads, *["hierarchical"] * (most > 1)]
    return ["packed", *others], "" if others else "without MPI_THREAD_MULTIPLE"


def _of_name(comm: Comm, model: Model, t: TrainConfig) -> GradSync:
    if t.grad_sync == "sharded" and comm.size > 1:
        return Sharded(comm, model, _reduce(comm, model, t), _sum_extra(comm, model, t))
    return _for_all(comm, model, t)


def _for_all(comm: Comm, model: Model, t: TrainConfig) -> AtTheEnd:
    """What gives every rank all gradients. Collective."""
    grads, name, size = model.grads, t.grad_sync, model.layout.size
    if comm.size == 1 or (t.wire == "float32" and name in ONE_CALL and not t.units):
        whole = OneCall(comm, grads.with_flags, name == "chunked")
        return AtTheEnd(name, whole, len(grads.with_flags), lambda: None)
    sum_extra = _sum_extra(comm, model, t)
    if name == "overlapped" and model.kernels.capabilities.is_async:
        assert comm.direct
        return Beside(size, comm.direct, _in_one_go(comm, model, t), model.kernels.between, sum_extra)
    if name == "overlapped":
        own = comm.patient()
        beside = way(own, grads.flat, t.wire, partial(_aside, model, t))
        return Overlapped(size, Owner(beside, own), sum_extra)
    return AtTheEnd(name, _sum_of_gradients(comm, model, t), size, sum_extra)


def _sum_extra(comm: Comm, model: Model, t: TrainConfig) -> Callable[[], None]:
    """The numbers behind the gradients, by themselves."""
    extra = model.grads.flags

    def sum_extra() -> None:
        if t.units:
            tree_sum(comm, extra[:1])
        comm.sum(extra[1:] if t.units else extra)

    return sum_extra


def _aside(model: Model, t: TrainConfig, comm: Comm, wire: str) -> Parts:
    """For a thread beside the workers."""
    return Parts(comm, model.grads.flat, wire, t.seed, HostWire(one_by_one, 1))


def _parts(comm: Comm, model: Model, t: TrainConfig, wire: str) -> Parts:
    k = model.kernels
    loops = k.wire or HostWire(k.each, k.threads)
    return Parts(comm, model.grads.flat, wire, t.seed, loops, by_twos=bool(t.units))


def _reduce(comm: Comm, model: Model, t: TrainConfig) -> Callable[[Sequence[int], int], None]:
    """What gives each rank the sum of its part."""
    direct = comm.direct
    if direct is None or t.wire != "float32":
        return _parts(comm, model, t, t.wire).reduce
    return lambda bounds, step: direct.reduce(model.grads.flat, bounds)


def _sum_of_gradients(comm: Comm, model: Model, t: TrainConfig) -> Way:
    """Without what lies behind them. Collective."""
    if t.grad_sync == "hierarchical":
        return way(comm, model.grads.flat, t.wire, lambda comm, wire: _parts(comm, model, t, wire))
    return _in_one_go(comm, model, t)


def parts_made(t: TrainConfig, ranks: int) -> int:
    """How many `Parts` a rank may have on a GPU at once; where NCCL reduces by itself, fewer."""
    if ranks == 1 or (t.wire == "float32" and not t.units):
        return int(has_shards(t, ranks))
    return 2 if t.grad_sync == BY_TRIAL and not is_local(t, ranks) else 1


def _in_one_go(comm: Comm, model: Model, t: TrainConfig) -> Way:
    """All ranks at once."""
    if t.wire == "float32" and not t.units:
        return OneCall(comm, model.grads.flat, t.grad_sync == "chunked")
    return _parts(comm, model, t, t.wire)


def refuse_unsuited(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about what does not go together."""
    if t.units:
        check_units(t, ranks, on_gpu)
    else:
        refuse_uneven(t.batch_size, ranks, t.grad_accum or 1)
    if is_local(t, ranks):
        check_local(t)
    if t.balance == "auto" and ranks > 1:
        check_balance(t)
    if ranks == 1:
        return
    if on_gpu and t.grad_sync == "hierarchical":
        raise UsageError(
            "--grad-sync hierarchical is for CPU stages; between GPUs use packed, or overlapped with NCCL"
        )
    if t.wire == "bfloat16" and t.dtype == "float64":
        raise UsageError("--wire bfloat16 leaves nothing of --dtype float64: use float32 for one of them")


def refuse_unable(t: TrainConfig, comm: Comm, on_gpu: bool) -> None:
    """Raise on all ranks a UsageError about what this job's MPI or NCCL cannot do. Collective."""
    refuse_anywhere(comm, _lacking(t, comm, on_gpu) if comm.size > 1 else "")


def _lacking(t: TrainConfig, comm: Comm, on_gpu: bool) -> str:
    if t.grad_sync == "overlapped" and on_gpu:
        return "" if comm.direct else WITHOUT_NCCL
    if t.grad_sync == "overlapped":
        return "" if comm.threads else WITHOUT_THREADS
    in_parts = t.grad_sync == "sharded" or t.wire != "float32"
    return ONLY_SUMS if on_gpu and comm.only_sums and in_parts else ""


def way(comm: Comm, flat: Array, wire: str, parts: MakeParts) -> Way:
    """The best one for how the ranks lie on nodes. Collective."""

    def across(comm: Comm) -> Way:
        return parts(comm, wire) if wire != "float32" else OneCall(comm, flat)

    levels = comm.levels()
    if levels is None:  # chunked: what stays in a cache is summed faster within a node
        is_one_node = comm.size == comm.local_size
        return OneCall(comm, flat, chunked=True) if is_one_node and wire == "float32" else across(comm)
    node, peers = levels
    return Owner(Levels(node, flat, parts(node, "float32"), across(peers)), node, peers)


def rehearse_exchange(kernels: Kernels, wire: str) -> None:
    """Compile every loop that an exchange may call."""
    grads = FlatBuffer(Layout([Spec("w", (LINE,))]), kernels.wide_zeros, flags=1)
    for by_twos in (False, True):
        Parts(SerialComm(), grads.flat, wire, 0, HostWire(one_by_one, 1), by_twos).sum(0, LINE, 0)
    Tree(grads, kernels, 1).add(0)


def one_by_one(work: Callable[[int], Any], count: int) -> None:
    """As `Kernels.each`, in the calling thread."""
    for part in range(count):
        work(part)

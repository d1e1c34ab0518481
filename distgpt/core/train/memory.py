"""Memory estimation before allocation, and the fastest step that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt, prod
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.base.formatting import size as size_of
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_memory
from distgpt.core.components import components
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.stages import Notes, Stage
from distgpt.core.model.memory import MATRIX
from distgpt.core.ops.api import Array, HostArray, Work
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.parallel_strategy import GradientSync, Placement, Strategy
from distgpt.core.train.step import Step

SPARE = 0.95  # the usable share of free memory; the system needs the rest
TOKENS, TOKENS_QUEUED = 1 << 13, 1 << 16  # tokens per micro-batch and rank; more is not faster
# Tokens per thread with a small base, whose runs should take little memory: at least as many as its matrices
# need, since each micro-batch expands them.
TOKENS_ABOVE_SMALL = 1 << 9
LIBRARIES = 1 << 30  # bytes that a GPU's libraries need for workspaces and autotuning
PROGRAM = 256 << 20  # bytes for compiled loops, their compiler and small buffers, on a CPU
FRACTION = 0.25  # maximum share for these on a small GPU, machine or rank


class Need(NamedTuple):
    """Bytes per rank."""

    weights: int  # parameters, in both dtypes if there are two
    optimizer: int  # gradients and moments
    activations: int  # saved for the backward pass, and scratch memory
    evaluation: int = 0  # activations of the evaluation pass
    exchange: int = 0  # buffers for partial transfers between GPUs
    update: int = 0  # scratch memory of Muon

    @property
    def total(self) -> int:
        return sum(self)


class DryKernels(Kernels):
    """Kernels of a dry run. They count requested memory but allocate and compute nothing."""

    def __init__(self, kernels: Kernels) -> None:
        self.dtype, self.accum_dtype, self.threads = kernels.dtype, kernels.accum_dtype, kernels.threads
        self.logits_bytes, self.slice_rows = kernels.logits_bytes, kernels.slice_rows
        self.capabilities = kernels.capabilities
        self.wire = kernels.wire and SimpleNamespace(zeros=self._new, piece=kernels.wire.piece)
        self.requested = 0  # total bytes
        self._before = 0

    def more(self) -> int:
        """Return the bytes requested since the last call."""
        more = self.requested - self._before
        self._before = self.requested
        return more

    def _new(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        self.requested += prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), dtype), shape)  # full shape, one element in memory

    def integers(self, host: HostArray | Sequence[int], dtype: str = "int32") -> Array:
        return self._new(np.shape(host), dtype)

    def put(self, array: Array, host: HostArray) -> None:
        return None

    def zero(self, x: Array) -> None:
        return None

    def record(self, work: Work) -> Work:
        return work


def needed(config: RunConfig, kernels: Kernels, strategy: Strategy, evaluated: bool = False) -> Need:
    """Estimate memory by a dry run, which builds the objects of a run without allocating."""
    dry = DryKernels(kernels)
    ranks = strategy.ranks
    placement = strategy.placement
    last = ranks - 1  # the last rank has the largest part
    comm = cast(Comm, SimpleNamespace(size=ranks, rank=last))
    model = components().model(config.train).build(config, dry)
    model.allocate_master_weights(ranks, placement.own(model.layout, last))
    weights = dry.more()
    if not placement.may_copy:  # one tensor gathered for saving
        dry.accum_zeros(max(spec.size for spec in model.layout.specs))
    optimizer = placement.state(model, last).optimizer
    states = dry.more()
    micro_batches = strategy.micro_batches(config.train, last, model)
    Step(optimizer, comm, config.train, GradientSync(), micro_batches=micro_batches)
    activations = dry.more()
    if evaluated:
        from distgpt.core.train.assessment import Scorer

        Scorer(model, comm).reserve(config.model.seq_len, spans=1 << 31)
    evaluation = dry.more()
    strategy.reserve(comm, model, config.train)
    # This assumes that one rank orthogonalizes all matrices; ranks may share them.
    shapes = [shape for spec in model.layout.specs if spec.group == MATRIX for shape in spec.orthogonal]
    try:
        update = kernels.orthogonalise_bytes(shapes) if config.train.optimizer == "muon" else 0
    except MemoryError:  # If this cannot even be allocated for counting, estimate four of the largest matrix.
        update = 4 * max(map(prod, shapes)) * kernels.accum_dtype.itemsize
    return Need(weights, states, activations, evaluation, dry.more(), update)


def fit_to_memory(
    config: RunConfig, stage: Stage, kernels: Kernels, strategy: Strategy, evaluated: bool, preferred: int = 0
) -> TrainConfig:
    """Resolve automatic settings by each rank's memory. If one has too little, none starts. Collective.

    All ranks use as many micro-batches as the rank with the least memory needs, or `preferred` if that fits.
    """
    comm = stage.comm
    t = config.train
    free, where = stage.free_memory()
    fit = partial(fitting, kernels=kernels, strategy=strategy, free=free, where=where, evaluated=evaluated)
    settings, need = on_every_rank(comm, lambda: fit(config, preferred=preferred))
    most = comm.allreduce_max(settings.grad_accum)
    if comm.allreduce_max(most - settings.grad_accum):  # another rank has less memory
        tried = replace(config, train=replace(t, grad_accum=most))
        settings, need = on_every_rank(comm, lambda: fit(tried))
    taken = need.total
    if kernels.capabilities.is_async:  # GPU memory, so all host memory is free
        free = granted_memory(comm.local_size).free
        taken = 0
    room = max(0, int(SPARE * free) - taken)
    fitted = replace(config, train=settings)
    save = on_root(comm, lambda: _way_to_save(fitted, kernels, strategy.placement, room, stage.notes))
    if settings.grad_accum > 1 and not t.grad_accum:
        each = t.batch_size // (settings.grad_accum * comm.size)
        stage.notes.add(
            f"each step runs {settings.grad_accum} micro-batches of {count(each, 'sequence')} per rank"
        )
    if t.grad_accum not in (0, settings.grad_accum):
        stage.notes.add(
            f"{strategy.counted_by} sets the micro-batches; --grad-accum {t.grad_accum} has no effect"
        )
    if kernels.capabilities.is_async and t.recompute == "auto":
        stage.notes.add(f"memory allows --recompute {settings.recompute}")
    return replace(settings, save=save)


def copy_bytes(config: RunConfig, kernels: Kernels) -> int:
    """Return the bytes that rank 0 copies to write a checkpoint during training."""
    layout = components().model(config.train).trained(config)
    optimizer = components().optimizer(config.train)
    return (2 * layout.size + optimizer.second_moments(layout).size) * int(kernels.accum_dtype.itemsize)


def _way_to_save(config: RunConfig, kernels: Kernels, placement: Placement, room: int, notes: Notes) -> str:
    """Resolve `save` to sync or async by the free bytes on rank 0. For rank 0."""
    t = config.train
    if t.save == "sync":
        return t.save
    if not placement.may_copy:
        if t.save == "async":
            raise UsageError(f"--save async requires all moments on one rank; omit {placement.option}")
        if t.save_every or t.save_minutes:
            notes.add("training pauses while saving, because every rank has a part of the checkpoint")
        return "sync"
    copy = copy_bytes(config, kernels)
    if copy <= room:
        return "async"
    if t.save == "async":
        raise UsageError(
            f"--save async requires {size_of(copy)} on rank 0, which has {size_of(room)} free; use sync"
        )
    notes.add("training pauses while saving, because there is not enough memory for a copy")
    return "sync"


def fitting(
    config: RunConfig,
    kernels: Kernels,
    strategy: Strategy,
    free: int,
    where: str,
    evaluated: bool = False,
    preferred: int = 0,
) -> tuple[TrainConfig, Need]:
    """Resolve `recompute` and `grad_accum` to the fastest values that fit into memory.

    Try `preferred` micro-batches first. If nothing fits, the error lists the required memory.
    """
    # The system and the program also need some of the free memory.
    program = min(LIBRARIES if kernels.capabilities.is_async else PROGRAM, FRACTION * free)
    budget = free - max((1 - SPARE) * free, program)
    for tried in _candidates(config, kernels, strategy, preferred):
        need = needed(replace(config, train=tried), kernels, strategy, evaluated)
        if need.total <= budget:
            return tried, need
    rows = config.train.batch_size // (tried.grad_accum * strategy.ranks)
    micro_batch = f"{count(rows, 'sequence')} of {config.model.seq_len} tokens"
    t = config.train
    fixed = {"recompute": t.recompute in ("none", "mlp"), "grad-accum": t.grad_accum and not strategy.count}
    ways = " and ".join(f"--{option}" for option, is_fixed in fixed.items() if is_fixed)
    hint = f"omit {ways} to let memory decide" if ways else "use more memory or a smaller model"
    held_out = f", validation {size_of(need.evaluation)}" if evaluated else ""
    updated = f", Muon's updates {size_of(need.update)}" if need.update else ""
    exchanged = f", exchange {size_of(need.exchange)}" if need.exchange else ""
    left = f" ({size_of(free - budget)} reserved for the program)" if need.total <= free else ""
    raise UsageError(
        f"this run requires {size_of(need.total)} on {where}, which has {size_of(free)} free{left}: "
        f"weights {size_of(need.weights)}, gradients and optimizer {size_of(need.optimizer)}, "
        f"activations of {micro_batch} {size_of(need.activations)}"
        f"{held_out}{exchanged}{updated}; {hint} (distgpt help out-of-memory)"
    )


def _candidates(
    config: RunConfig, kernels: Kernels, strategy: Strategy, preferred: int
) -> Iterator[TrainConfig]:
    """Yield settings of a step, fastest first, from large micro-batches with little recomputation."""
    t = config.train
    seq_len = config.model.seq_len
    is_async = kernels.capabilities.is_async
    # More than "mlp" saves is not faster on a CPU.
    best_first = ("none", "mlp", "block") if is_async else ("mlp", "block")
    hows = best_first if t.recompute == "auto" else (t.recompute,)
    each = t.batch_size // strategy.ranks
    size = {n: each // n * seq_len for n in divisors(each)}  # number of micro-batches → tokens of each
    if fixed := strategy.count or t.grad_accum:
        size = {fixed: size[fixed]}
    most = TOKENS_QUEUED if is_async else TOKENS
    if t.is_base_small:
        most = min(most, TOKENS_ABOVE_SMALL * kernels.threads)
    first = [n for n in size if most / 4 < size[n] <= most]
    if not first:  # if all are smaller, one micro-batch; otherwise the next larger size
        first = [max((n for n in size if size[n] > most), default=min(size))]
    for some in ([preferred] if preferred in size else [], first, [n for n in size if n > max(first)]):
        yield from (replace(t, recompute=how, grad_accum=n) for how in hows for n in some)


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

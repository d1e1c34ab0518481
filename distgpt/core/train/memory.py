"""The memory that a run needs, counted before any is allocated, and the fastest step that fits into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.base.formatting import size as size_of
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.limits import granted_memory
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.layers import SIDES
from distgpt.core.model.memory import MATRIX
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.ops.api import Array, Kernels, Work
from distgpt.core.train.compatibility import refuse_unsuited
from distgpt.core.train.scoring import Scorer
from distgpt.core.train.seams import kind_of
from distgpt.core.train.sharing import Exchange, Placement, Strategy
from distgpt.core.train.step import Step

SPARE = 0.95  # of the free memory: the system needs some too
TOKENS, TOKENS_QUEUED = 1 << 13, 1 << 16  # of a micro-batch on each rank: more do not make it faster
LIBRARIES = 1 << 30  # a GPU's libraries need up to so much, for workspaces and trials
PROGRAM = 256 << 20  # compiled loops, what compiles them and small buffers, on a CPU
FRACTION = 0.25  # but at most this fraction of a small GPU, of a small machine or of a rank's part of one


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank."""

    weights: int  # parameters, in both types where there are two
    optimizer: int  # gradients and moments
    activations: int  # what a pass keeps, and its scratch memory
    evaluation: int = 0  # the same of the pass that evaluates
    exchange: int = 0  # what travels between GPUs in parts
    update: int = 0  # what Muon computes in

    @property
    def total(self) -> int:
        parts = self.weights, self.optimizer, self.activations, self.evaluation, self.exchange, self.update
        return sum(parts)


class Counting:
    """Kernels that count the memory they are asked for and allocate none."""

    def __init__(self, kernels: Kernels) -> None:
        self.dtype, self.wide, self.threads = kernels.dtype, kernels.wide, kernels.threads
        self.logits_bytes, self.slab_rows = kernels.logits_bytes, kernels.slab_rows
        self.capabilities = kernels.capabilities
        self.wire = kernels.wire and SimpleNamespace(zeros=self._count, piece=kernels.wire.piece)
        self.taken = 0

    def zeros(self, *shape: int) -> Array:
        return self._count(shape, self.dtype)

    def wide_zeros(self, *shape: int) -> Array:
        return self._count(shape, self.wide)

    def scalars(self, count: int) -> Array:
        return self._count((count,), np.float64)

    def integers(self, host: Any, dtype: str = "int32") -> Array:
        return self._count(np.shape(host), dtype)

    def put(self, array: Array, host: Any) -> None:
        return None

    def record(self, work: Work) -> Work:
        return work

    def _count(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self.taken += prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), dtype), shape)  # of this shape, with one element


def needed(run: RunConfig, kernels: Kernels, strategy: Strategy, evaluated: bool = False) -> Need:
    """Count by building the very objects of a run, with kernels that only count."""
    counting, ranks, placement = Counting(kernels), strategy.ranks, strategy.placement
    last = ranks - 1  # the rank whose part is the largest
    sequences = run.train.batch_size // ((run.train.grad_accum or 1) * ranks)
    comm = cast(Comm, SimpleNamespace(size=ranks, rank=last))
    model = kind_of(run.train).build(run, cast(Kernels, counting))
    taken = [0]

    def more() -> int:
        taken.append(counting.taken)
        return taken[-1] - taken[-2]

    model.train(ranks, placement.own(model.layout, last))
    weights = more()
    if not placement.may_copy:  # a tensor on its way to be saved
        counting.wide_zeros(max(spec.size for spec in model.layout.specs))
    optimizer = placement.state(model, last).optimizer
    _ = model.grads
    states = more()
    try:
        micro_batches = strategy.micro_batches(run.train, last, model)
        Step(optimizer, comm, run.train, Exchange(), micro_batches=micro_batches)
    except MemoryError:  # the batch itself, on the host
        many = f"{count(sequences, 'sequence')} of {run.model.seq_len} tokens"
        raise UsageError(f"{many} in one micro-batch are too many") from None
    if kernels.capabilities.copy_bytes:
        counting.taken += _copies(run.model, sequences * run.model.seq_len, kernels.capabilities.copy_bytes)
    activations = more()
    if evaluated:
        Scorer(model, comm).reserve(run.model.seq_len, spans=1 << 31)
    evaluation = more()
    strategy.reserve(comm, model, run.train)
    # As if one rank orthogonalised all matrices, which ranks may share.
    shapes = [shape for spec in model.layout.specs if spec.group == MATRIX for shape in spec.matrices]
    try:
        update = kernels.orthogonalise_bytes(shapes) if run.train.optimizer == "muon" else 0
    except MemoryError:  # it is made to be counted: there is not even room for one, of four such matrices
        update = 4 * max(map(prod, shapes)) * kernels.wide.itemsize
    return Need(weights, states, activations, evaluation, more(), update)


def _copies(model: ModelConfig, rows: int, copy_bytes: Callable[[int], int]) -> int:
    """Return the bytes of copies that matmuls keep: of the largest matrices, and as much for smaller ones."""
    widest = max(model.qkv_width, SIDES[model.mlp] * model.hidden)
    return 2 * (copy_bytes(rows * widest) + copy_bytes(model.padded_vocab * model.n_embd))


def fit_to_memory(
    run: RunConfig, stage: Stage, kernels: Kernels, strategy: Strategy, evaluated: bool, preferred: int = 0
) -> TrainConfig:
    """Resolve automatic values by each rank's memory; where one rank has too little, none starts. Collective.

    All ranks take as many micro-batches as the one with the least memory needs; `preferred`, if they can.
    """
    comm, free, asked = stage.comm, stage.free_memory(), run.train
    on_root(comm, lambda: refuse_unsuited(asked, comm.size, on_gpu=stage.device is not None))
    strategy.refuse_unable(comm, on_gpu=stage.device is not None)

    def fit(micro_batches: int, preferred: int = 0) -> TrainConfig:
        tried = replace(run, train=replace(asked, grad_accum=micro_batches))
        return on_every_rank(comm, lambda: fitting(tried, kernels, strategy, *free, evaluated, preferred))

    alone = fit(asked.grad_accum, preferred)
    fitted = fit(comm.allreduce_max(alone.grad_accum))
    way = on_root(comm, lambda: _way_to_save(run, fitted, stage, kernels, strategy, evaluated))
    fitted = replace(fitted, save=way)
    if fitted.grad_accum > 1 and not asked.grad_accum:
        each = asked.batch_size // (fitted.grad_accum * comm.size)
        stage.notes.add(
            f"a step takes {fitted.grad_accum} micro-batches of {count(each, 'sequence')} on each rank"
        )
    if asked.grad_accum not in (0, fitted.grad_accum):
        stage.notes.add(
            f"{strategy.counted_by} decides the micro-batches: --grad-accum {asked.grad_accum} has no effect"
        )
    if kernels.capabilities.is_async and asked.recompute == "auto":
        stage.notes.add(f"memory allows --recompute {fitted.recompute}")
    return fitted


def copy_bytes(run: RunConfig, kernels: Kernels, placement: Placement) -> int:
    """Return the bytes that rank 0 copies to write a checkpoint while training goes on; 0 if it does not."""
    if run.train.save == "sync" or not placement.may_copy:
        return 0
    layout, optimizer = kind_of(run.train).trained(run), OPTIMIZERS[run.train.optimizer]
    return (2 * layout.size + optimizer.second_moments(layout).size) * int(kernels.wide.itemsize)


def _way_to_save(
    run: RunConfig, fitted: TrainConfig, stage: Stage, kernels: Kernels, strategy: Strategy, evaluated: bool
) -> str:
    """Return sync or async, where `save` may be auto. For rank 0."""
    if fitted.save == "sync":
        return fitted.save
    if not strategy.placement.may_copy:
        if fitted.save == "async":
            option = strategy.placement.option
            raise UsageError(f"--save async does not go with {option}: no rank has all moments")
        if fitted.save_every or fitted.save_minutes:
            stage.notes.add("training waits while a checkpoint is written: all ranks have a part of it")
        return "sync"
    free, taken = granted_memory(stage.comm.local_size).free, 0
    if not kernels.capabilities.is_async:  # else those are in a GPU's memory
        taken = needed(replace(run, train=fitted), kernels, strategy, evaluated).total
    copy, room = copy_bytes(run, kernels, strategy.placement), max(0, int(SPARE * free) - taken)
    if copy <= room:
        return "async"
    if fitted.save == "async":
        raise UsageError(
            f"--save async needs a copy of {size_of(copy)} on rank 0, and {size_of(room)} are left: use sync"
        )
    stage.notes.add("training waits while a checkpoint is written: there is no memory for a copy")
    return "sync"


def have_memory(
    config: RunConfig,
    settings: TrainConfig,
    stage: Stage,
    kernels: Kernels,
    strategy: Strategy,
    is_evaluated: bool,
    shares: Sequence[int],
) -> bool:
    """Return whether every rank has memory for its share of a micro-batch and for the rest. Collective."""
    comm, t = stage.comm, settings

    def fits() -> bool:
        own = replace(config, train=replace(t, batch_size=shares[comm.rank] * comm.size * t.grad_accum))
        need = needed(own, kernels, strategy, is_evaluated)
        copied = copy_bytes(own, kernels, strategy.placement) if comm.rank == 0 and t.save == "async" else 0
        free, _ = stage.free_memory()
        return need.total - need.weights - need.optimizer + copied <= SPARE * free

    return not comm.allreduce_max(not on_every_rank(comm, fits))


def fitting(
    run: RunConfig,
    kernels: Kernels,
    strategy: Strategy,
    free: int,
    where: str,
    evaluated: bool = False,
    preferred: int = 0,
) -> TrainConfig:
    """Resolve `recompute` and `grad_accum`: the fastest way that fits into memory.

    `preferred` micro-batches are tried first. Where nothing fits, the error says what is needed, and which
    options need less.
    """
    budget = _budget(kernels, free)
    for tried in _candidates(run, kernels, strategy, preferred):
        need = needed(replace(run, train=tried), kernels, strategy, evaluated)
        if need.total <= budget:
            return tried
    rows = run.train.batch_size // (tried.grad_accum * strategy.ranks)
    further = _ways_out(replace(run, train=tried), kernels, strategy, budget, evaluated)
    ways = [f"{option} (needs {size_of(size)})" for option, size in further]
    hint = f"; try {' or '.join(ways)}" if ways else "; it needs more memory, or a smaller model"
    held_out = f", validation {size_of(need.evaluation)}" if evaluated else ""
    updated = f", Muon's updates {size_of(need.update)}" if need.update else ""
    exchanged = f", exchange {size_of(need.exchange)}" if need.exchange else ""
    left = f" ({size_of(free - budget)} of them for the program itself)" if need.total <= free else ""
    raise UsageError(
        f"this run needs {size_of(need.total)} on {where}, where {size_of(free)} are free{left}: "
        f"weights {size_of(need.weights)}, gradients and optimizer {size_of(need.optimizer)}, "
        f"activations of {count(rows, 'sequence')} of {run.model.seq_len} tokens {size_of(need.activations)}"
        f"{held_out}{exchanged}{updated}{hint} (distgpt help out-of-memory)"
    )


def _budget(kernels: Kernels, free: int) -> float:
    besides = LIBRARIES if kernels.capabilities.is_async else PROGRAM
    return free - max((1 - SPARE) * free, min(besides, FRACTION * free))


def _candidates(
    run: RunConfig, kernels: Kernels, strategy: Strategy, preferred: int
) -> Iterator[TrainConfig]:
    """Ways to take a step, the fastest first: large micro-batches, little recomputed; then smaller ones."""
    t, seq_len = run.train, run.model.seq_len
    hows = choices(kernels) if t.recompute == "auto" else (t.recompute,)
    each = t.batch_size // strategy.ranks
    size = {n: each // n * seq_len for n in divisors(each)}  # of a micro-batch in tokens, by their number
    if fixed := strategy.fixed_count(t):
        size = {fixed: size[fixed]}
    most = TOKENS_QUEUED if kernels.capabilities.is_async else TOKENS
    first = [n for n in size if most / 4 < size[n] <= most]
    if not first:  # all are smaller: a single one; else the next larger one
        first = [max((n for n in size if size[n] > most), default=min(size))]
    for some in ([preferred] if preferred in size else [], first, [n for n in size if n > max(first)]):
        yield from (replace(t, recompute=how, grad_accum=n) for how in hows for n in some)


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def choices(kernels: Kernels) -> tuple[str, ...]:
    """Ways to recompute, best first. On a CPU keeping more than "mlp" does is not faster."""
    return ("none", "mlp", "block") if kernels.capabilities.is_async else ("mlp", "block")


def _ways_out(
    run: RunConfig, kernels: Kernels, strategy: Strategy, budget: float, evaluated: bool
) -> list[tuple[str, int]]:
    """Options that make it fit: recomputing more, and more micro-batches of fewer sequences."""
    t = run.train

    def first_that_fits(tries: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int]]:
        for option, values in tries:
            size = needed(replace(run, train=replace(t, **values)), kernels, strategy, evaluated).total
            if size <= budget:
                return [(option, size)]
        return []

    stronger = {"none": ("mlp", "block"), "mlp": ("block",), "block": ()}[t.recompute]
    again = first_that_fits([(f"--recompute {how}", {"recompute": how}) for how in stronger])
    per_micro_batch = t.batch_size // (t.grad_accum * strategy.ranks)
    counts = [] if strategy.counted_by else [t.grad_accum * n for n in divisors(per_micro_batch)[1:]]
    smaller = first_that_fits([(f"--grad-accum {n}", {"grad_accum": n}) for n in counts])
    return again + smaller

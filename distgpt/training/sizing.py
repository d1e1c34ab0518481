"""How much memory a run will need, found out before any is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from distgpt.comm.agree import refuse_anywhere
from distgpt.comm.api import Comm
from distgpt.config import RunConfig, TrainConfig
from distgpt.errors import UsageError
from distgpt.evaluation.scoring import Scorer
from distgpt.kernels.api import Array, Kernels, Work
from distgpt.machine.stages import Stage
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.training.step import Step
from distgpt.units import count

SPARE = 0.95  # of what is free: the system wants some too
ROUND, ROUND_QUEUED = 1 << 13, 1 << 16  # tokens of a round on each rank: more do not make it faster
LIBRARIES = 1 << 30  # and a GPU's libraries up to so much, for workspaces and to try out ways
LIBRARIES_SHARE = 0.25  # but no more than this of a small GPU, or of a rank's part of one


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes, of one rank."""

    weights: int  # parameters, in both types where there are two
    optimizer: int  # gradients and moments
    activations: int  # what a pass keeps, and its scratch memory
    assessment: int = 0  # the same of the pass over what is held out

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations + self.assessment


class Counting:
    """Kernels that count the memory they are asked for, and give none."""

    def __init__(self, kernels: Kernels) -> None:
        self.dtype, self.wide, self.threads = kernels.dtype, kernels.wide, kernels.threads
        self.logits_bytes, self.norm_partials = kernels.logits_bytes, kernels.norm_partials
        self.in_place, self.queued = kernels.in_place, kernels.queued
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
        return np.broadcast_to(np.zeros((), dtype), shape)  # looks like one, and has one number


def needed(run: RunConfig, kernels: Kernels, ranks: int, assessed: bool = False) -> Need:
    """Of the very objects that a run is made of."""
    counting = Counting(kernels)
    comm = cast(Comm, SimpleNamespace(size=ranks))
    model = Model(run.model, cast(Kernels, counting))
    taken = [0]

    def more() -> int:
        taken.append(counting.taken)
        return taken[-1] - taken[-2]

    model.train()
    weights = more()
    optimizer = AdamW(model, run.train)
    _ = model.grads
    states = more()
    Step(model, optimizer, comm, run.train)
    activations = more()
    if assessed:
        Scorer(model, comm).reserve(run.model.seq_len, spans=1 << 31)
    return Need(weights, states, activations, more())


def settle(run: RunConfig, stage: Stage, kernels: Kernels, assessed: bool, rounds: int = 0) -> TrainConfig:
    """What "automatic" comes to by each rank's memory; where one has too little, none starts. Collective.

    All ranks take as many rounds as the one with the least memory needs; `rounds`, if they can.
    """
    comm, free, asked = stage.comm, stage.free_memory(), run.train

    def settled_on(rounds: int, preferred: int = 0) -> TrainConfig:
        complaint, settled = "", asked
        try:
            tried = replace(run, train=replace(asked, grad_accum=rounds))
            settled = fitting(tried, kernels, comm.size, *free, assessed, preferred)
        except UsageError as error:
            complaint = str(error)
        refuse_anywhere(comm, complaint)
        return settled

    alone = settled_on(asked.grad_accum, rounds)
    settled = settled_on(comm.largest(alone.grad_accum))
    if settled.grad_accum > 1 and not asked.grad_accum:
        each = asked.batch_size // (settled.grad_accum * comm.size)
        stage.notes.add(f"a step takes {settled.grad_accum} rounds of {each} sequence(s) on each rank")
    if kernels.queued and asked.recompute == "auto":
        stage.notes.add(f"memory allows --recompute {settled.recompute}")
    return settled


def fitting(
    run: RunConfig,
    kernels: Kernels,
    ranks: int,
    free: int,
    where: str,
    assessed: bool = False,
    preferred: int = 0,
) -> TrainConfig:
    """What "automatic" comes to in `recompute` and `grad_accum`: the fastest way that fits into memory.

    `preferred` rounds go first. Where nothing fits, it is said what is needed, and what would bring it down.
    """
    budget = _budget(kernels, free)
    for tried in _candidates(run, kernels, ranks, preferred):
        need = needed(replace(run, train=tried), kernels, ranks, assessed)
        if need.total <= budget:
            return tried
    rows = run.train.batch_size // (tried.grad_accum * ranks)
    further = _ways_out(replace(run, train=tried), kernels, ranks, budget, assessed)
    ways = [f"{option} (needs {_gib(size)})" for option, size in further]
    hint = f"; try {' or '.join(ways)}" if ways else "; it needs more memory, or a smaller model"
    held_out = f", validation {_gib(need.assessment)}" if assessed else ""
    raise UsageError(
        f"this run needs {_gib(need.total)} on {where}, where {_gib(free)} are free: "
        f"weights {_gib(need.weights)}, gradients and optimizer {_gib(need.optimizer)}, "
        f"activations of {count(rows, 'sequence')} of {run.model.seq_len} tokens {_gib(need.activations)}"
        f"{held_out}{hint}"
    )


def _budget(kernels: Kernels, free: int) -> float:
    return free - max((1 - SPARE) * free, min(LIBRARIES, LIBRARIES_SHARE * free) if kernels.queued else 0)


def _candidates(run: RunConfig, kernels: Kernels, ranks: int, preferred: int) -> Iterator[TrainConfig]:
    """Ways to take a step, the fastest first: large rounds, little computed again; then smaller ones."""
    t, seq_len = run.train, run.model.seq_len
    hows = choices(kernels) if t.recompute == "auto" else (t.recompute,)
    each = t.batch_size // ranks
    size = {n: each // n * seq_len for n in divisors(each)}  # of a round, by their number
    if t.grad_accum:
        size = {t.grad_accum: size[t.grad_accum]}
    most = ROUND_QUEUED if kernels.queued else ROUND
    first = [n for n in size if most / 4 < size[n] <= most]
    if not first:  # all are smaller: a single round; else the next larger one
        first = [max((n for n in size if size[n] > most), default=min(size))]
    for some in ([preferred] if preferred in size else [], first, [n for n in size if n > max(first)]):
        yield from (replace(t, recompute=how, grad_accum=n) for how in hows for n in some)


def divisors(number: int) -> list[int]:
    found, factor = [1], 2
    while number > 1:
        if factor * factor > number:  # what is left is a prime
            factor = number
        powers = [1]
        while number % factor == 0:
            number //= factor
            powers.append(powers[-1] * factor)
        found = [divisor * power for divisor in found for power in powers]
        factor += 1
    return sorted(found)


def choices(kernels: Kernels) -> tuple[str, ...]:
    """Ways to recompute, best first. On a CPU keeping more than "mlp" does is not faster."""
    return ("none", "mlp", "block") if kernels.queued else ("mlp", "block")


def _ways_out(
    run: RunConfig, kernels: Kernels, ranks: int, budget: float, assessed: bool
) -> list[tuple[str, int]]:
    """Options that make it fit: computing again instead of keeping, and more rounds of fewer sequences."""
    t = run.train

    def first_that_fits(tries: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int]]:
        for option, values in tries:
            size = needed(replace(run, train=replace(t, **values)), kernels, ranks, assessed).total
            if size <= budget:
                return [(option, size)]
        return []

    stronger = {"none": ("mlp", "block"), "mlp": ("block",), "block": ()}[t.recompute]
    again = first_that_fits([(f"--recompute {how}", {"recompute": how}) for how in stronger])
    per_round = t.batch_size // (t.grad_accum * ranks)
    rounds = [t.grad_accum * n for n in divisors(per_round)[1:]]
    smaller = first_that_fits([(f"--grad-accum {n}", {"grad_accum": n}) for n in rounds])
    return again + smaller


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.0f} MiB"

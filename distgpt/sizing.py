"""How much memory a run will need, found out before any is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from distgpt.comm.api import Comm
from distgpt.config import RunConfig
from distgpt.errors import UsageError
from distgpt.kernels.api import Array, Kernels, Work
from distgpt.model import Model
from distgpt.optim import AdamW
from distgpt.step import Step

SPARE = 0.95  # of what is free: the system wants some too
LIBRARIES = 1 << 30  # and a GPU's libraries up to so much, for workspaces and to try out ways
LIBRARIES_SHARE = 0.25  # but no more than this of a small GPU, or of a rank's part of one


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes, of one rank."""

    weights: int  # parameters, in both types where there are two
    optimizer: int  # gradients and moments
    activations: int  # what a pass keeps, and its scratch memory

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations


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


def needed(run: RunConfig, kernels: Kernels, ranks: int) -> Need:
    """Of the very objects that a run is made of."""
    counting = Counting(kernels)
    model = Model(run.model, cast(Kernels, counting))
    model.train()
    weights = counting.taken
    optimizer = AdamW(model, run.train)
    _ = model.grads
    before_step = counting.taken
    Step(model, optimizer, cast(Comm, SimpleNamespace(size=ranks)), run.train, run.train.recompute)
    return Need(weights, before_step - weights, counting.taken - before_step)


def fitting(run: RunConfig, kernels: Kernels, ranks: int, free: int, where: str) -> str:
    """What `recompute` comes to: what was asked for, or what keeps most of what fits into the free memory.

    Where nothing fits, it is said what is needed, and which options bring it down.
    """
    asked = run.train.recompute
    for how in choices(kernels) if asked == "auto" else (asked,):
        settled = replace(run, train=replace(run.train, recompute=how))
        need = needed(settled, kernels, ranks)
        if need.total <= _budget(kernels, free):
            return how
    run = settled
    rows = run.train.batch_size // (run.train.grad_accum * ranks)
    ways = [f"{option} (needs {_gib(size)})" for option, size in _ways_out(run, kernels, ranks, free)]
    hint = f"; try {' or '.join(ways)}" if ways else "; it needs more memory, or a smaller model"
    raise UsageError(
        f"this run needs {_gib(need.total)} on {where}, where {_gib(free)} are free: "
        f"weights {_gib(need.weights)}, gradients and optimizer {_gib(need.optimizer)}, "
        f"activations of {rows} sequences of {run.model.seq_len} tokens {_gib(need.activations)}{hint}"
    )


def _budget(kernels: Kernels, free: int) -> float:
    return free - max((1 - SPARE) * free, min(LIBRARIES, LIBRARIES_SHARE * free) if kernels.queued else 0)


def choices(kernels: Kernels) -> tuple[str, ...]:
    """Ways to recompute, best first. On a CPU keeping more than "mlp" does is not faster."""
    return ("none", "mlp", "block") if kernels.queued else ("mlp", "block")


def _ways_out(run: RunConfig, kernels: Kernels, ranks: int, free: int) -> list[tuple[str, int]]:
    """Options that make it fit: computing again instead of keeping, and more rounds of fewer sequences."""
    t = run.train

    def first_that_fits(tries: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int]]:
        for option, values in tries:
            size = needed(replace(run, train=replace(t, **values)), kernels, ranks).total
            if size <= _budget(kernels, free):
                return [(option, size)]
        return []

    stronger = {"none": ("mlp", "block"), "mlp": ("block",), "block": ()}[t.recompute]
    again = first_that_fits([(f"--recompute {how}", {"recompute": how}) for how in stronger])
    per_round = t.batch_size // (t.grad_accum * ranks)
    rounds = [t.grad_accum * n for n in range(2, per_round + 1) if per_round % n == 0]
    smaller = first_that_fits([(f"--grad-accum {n}", {"grad_accum": n}) for n in rounds])
    return again + smaller


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.0f} MiB"

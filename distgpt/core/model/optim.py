"""AdamW on the flat buffers, clipping by global norm, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distgpt.core.config import TrainConfig
from distgpt.core.model.memory import (
    EMBEDDING,
    GROUPS,
    HEAD,
    VALUES,
    VECTOR,
    FlatBuffer,
    FlatPart,
    Layout,
    Spec,
)
from distgpt.core.model.model import Model
from distgpt.core.ops.api import AdamConstants, AdamState, Kernels, StepScalars


class AdamW:
    """Owns the two moments of every parameter.

    With `own`, those of this part alone: other ranks have the rest, and `apply` changes only this part.
    """

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        own: slice | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`rank` of `ranks` is for Muon, whose ranks share the work. AdamW computes all updates on each."""
        self.model, self.config = model, config
        k, layout = model.kernels, model.layout
        self.own = own or slice(0, layout.size)
        self.m = _moment(layout, own, k)
        second = self.second_moments(layout)
        self.v_own = slice(*(position_in(second, layout, at) for at in (self.own.start, self.own.stop)))
        self.v = _moment(second, own and self.v_own, k)
        self.norm = k.scalars(1)  # Σ g² of the last step
        self._scalars = k.scalars(len(StepScalars._fields) + 2 * len(GROUPS))
        # Of AdamState. A tensor may lie elsewhere in v than in p: Muon's have shorter second moments.
        found = layout.ranges(self.group_number, self.own)
        begins = (
            position_in(second, layout, self.own.start + start) - self.v_own.start for start, *_ in found
        )
        rows = [(*each, begin) for each, begin in zip(found, begins, strict=True)]
        self._ranges = k.integers(np.reshape(rows, (-1, 4)), "int64")
        self._norm_pass = k.record(self._launch_norm)
        self._update = k.record(self._launch)

    @staticmethod
    def second_moments(layout: Layout) -> Layout:
        """Return the layout of the second moments."""
        return layout

    @staticmethod
    def group_number(spec: Spec) -> int:
        """Return the index of a tensor's group, -1 where AdamW does not update it."""
        return GROUPS.index(spec.group)

    @property
    def is_part(self) -> bool:
        """True if other ranks have the rest of the moments."""
        return isinstance(self.m, FlatPart)

    @property
    def update_bounds(self) -> Sequence[int]:
        """Return where each rank's part of the gradients begins, which ranks share between `prepare` and
        `apply`; nothing where they share none."""
        return ()

    def step(self, step: int, grad_scale: float) -> float:
        """Compute the norm and update the parameters; return the learning rate used."""
        lr = learning_rate(self.config, step)
        self.compute_norm()
        self.prepare(step, lr, grad_scale, grad_scale)
        self.apply()
        return lr

    def compute_norm(self) -> None:
        """norm ← Σ g²"""
        self._norm_pass()

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        """Begin an update with grad_scale · gradients, clipped as if their norm were norm_scale · √norm."""
        values = step_scalars(self.config, step, lr, grad_scale, norm_scale)
        self.model.kernels.put(self._scalars, np.array(values))

    def apply(self) -> None:
        """Update the parameters, unless the norm is not finite."""
        self._update()

    def _launch_norm(self) -> None:
        self.model.kernels.sum_squares(self.norm, self.model.grads.flat)

    def _launch(self) -> None:
        model, c, own = self.model, self.config, self.own
        low = model.params.flat[own] if model.has_low_precision_copy else None
        p, g = model.precise(own), model.grads.flat[own]
        state = AdamState(p, low, self.m.flat, self.v.flat, g, self._ranges)
        model.kernels.adamw(state, self.norm, self._scalars, AdamConstants(c.beta1, c.beta2, c.eps))


def step_scalars(
    config: TrainConfig, step: int, lr: float, grad_scale: float, norm_scale: float
) -> list[float]:
    """Return the hyperparameters of a step of AdamW, as `Kernels.adamw` reads them.

    A step size carries the bias correction of the first moment.
    """
    scalars = StepScalars(
        grad_scale,
        clip=clip_norm(config, grad_scale, norm_scale),
        inv_sqrt_bias_correction=(1 - config.beta2 ** (step + 1)) ** -0.5,
    )
    correction = 1 - config.beta1 ** (step + 1)
    own = {
        EMBEDDING: config.embedding_lr,
        VALUES: config.value_lr or config.embedding_lr,
        HEAD: config.head_lr,
        VECTOR: config.vector_lr,
    }
    values = list(scalars)
    for group in GROUPS:
        rate = own[group] * (lr / config.lr) if own.get(group) else lr
        decays = group != VECTOR and config.optimizer == "adamw"
        values += [rate / correction, 1 - rate * config.weight_decay if decays else 1.0]
    return values


def clip_norm(config: TrainConfig, grad_scale: float, norm_scale: float) -> float:
    """Return the norm to clip to, in the unit that kernels compare with: the gradients'."""
    return config.clip * (grad_scale / norm_scale)


def learning_rate(config: TrainConfig, step: int, elapsed: float | None = None) -> float:
    """Return the learning rate of a step, from 0 on: a linear warm-up, then the schedule.

    The schedule follows the steps, or the fraction of the run's time that has `elapsed`, from 0 to 1.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, max(0.0, _decay_progress(config, step, elapsed)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * left


def _decay_progress(config: TrainConfig, step: int, elapsed: float | None) -> float:
    """Return how far the schedule has come on its way down: not above 0 before it, at least 1 after it."""
    constant = 1 - config.decay_fraction if config.schedule == "wsd" else 0.0
    if elapsed is not None:
        return (elapsed - constant) / max(1e-9, 1 - constant)
    begin = max(config.warmup, round(config.steps * constant))
    return (step - begin) / max(1, config.steps - begin)


def position_in(other: Layout, layout: Layout, position: int) -> int:
    """Return where an element of `layout` lies in one whose tensors are those of `layout`, or shorter.

    The element is of a tensor that both have alike, or the first of one.
    """
    if position == layout.size:
        return other.size
    name = layout.tensor_at(position)
    return other.offsets[name] + position - layout.offsets[name]


def _moment(layout: Layout, own: slice | None, kernels: Kernels) -> FlatBuffer | FlatPart:
    return FlatPart(layout, own, kernels.wide_zeros) if own else FlatBuffer(layout, kernels.wide_zeros)

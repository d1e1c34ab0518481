"""AdamW on the flat buffers, clipping by global norm, and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import collective_error
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
from distgpt.core.ops.api import AdamConstants, AdamState, Array, StepScalars
from distgpt.core.ops.kernels import Kernels, clipped

UPDATED_AT_ONCE = 1 << 16  # elements per worker at a time, to fit its cache


class AdamW:
    """AdamW with its two moments of every parameter.

    With `own`, it has and updates only this part. Other ranks have the rest.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        """`rank` and `ranks` are for Muon, whose ranks share the work. AdamW ranks compute all updates."""
        self.model = model
        self.config = config
        model.make_gradients()
        k = model.kernels
        layout = model.layout
        self.own = own or slice(0, layout.size)
        self.m = _moment(layout, own, k)
        # AdamW's v has the layout of m. Muon, a subclass, has fewer second moments. A tensor, and this rank's
        # part, then has other offsets in v than in p.
        second = self.second_moments(layout)
        first = layout.position_in(second, self.own.start)
        self.v_own = slice(first, layout.position_in(second, self.own.stop))
        self.v = _moment(second, own and self.v_own, k)
        self.norm = k.scalars(1)  # Σ g² of the last step
        self._scalars = k.scalars(len(StepScalars._fields) + 2 * len(GROUPS))
        rows = [  # rows of `AdamState.ranges`
            (start, stop, group, layout.position_in(second, self.own.start + start) - first)
            for start, stop, group in layout.ranges(self.group_number, self.own)
        ]
        self._ranges = k.integers(np.reshape(rows, (-1, 4)), "int64")
        self._norm_pass = k.record(self._launch_norm)
        self._update = k.record(self._launch)

    @staticmethod
    def second_moments(layout: Layout) -> Layout:
        return layout

    @staticmethod
    def group_number(spec: Spec) -> int:
        """Return the index of a tensor's group, or -1 if AdamW does not update it."""
        return GROUPS.index(spec.group)

    @property
    def is_part(self) -> bool:
        """Whether other ranks have the rest of the moments."""
        return isinstance(self.m, FlatPart)

    @property
    def update_bounds(self) -> Sequence[int]:
        """Boundaries of the ranks' parts of the gradients, shared between `prepare` and `apply`, or ()."""
        return ()

    def step(self, step: int, grad_scale: float, lr: float | None = None) -> None:
        """Compute the norm and update the parameters. `lr` overrides the schedule's learning rate."""
        lr = learning_rate(self.config, step) if lr is None else lr
        self.compute_norm()
        self.prepare(step, lr, grad_scale, grad_scale)
        self.apply()

    def compute_norm(self) -> None:
        """norm ← Σ g²"""
        self._norm_pass()

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        """Start an update with grad_scale · gradients, clipped as if their norm were norm_scale · √norm.

        The two differ if ranks do not sum their gradients at each step. Each rank then uses its own
        gradients, and all clip by the root mean square of their norms.
        """
        values = step_scalars(self.config, step, lr, grad_scale, norm_scale)
        self.model.kernels.put(self._scalars, np.array(values))

    def apply(self) -> None:
        """Update the parameters, unless the norm is not finite."""
        self._update()

    def _launch_norm(self) -> None:
        self.model.kernels.sum_squares(self.norm, self.model.grads.flat)

    def _launch(self) -> None:
        model = self.model
        c = self.config
        own = self.own
        low = model.params.flat[own] if model.has_low_precision_copy else None
        p = model.masters(own)
        g = model.grads.flat[own]
        state = AdamState(p, low, self.m.flat, self.v.flat, g, self._ranges)
        model.kernels.adamw(state, self.norm, self._scalars, AdamConstants(c.beta1, c.beta2, c.eps))


class Elementwise(AdamW):
    """Base class for elementwise optimizers of extensions, on CPUs. Subclasses implement `update`.

    Clipping, the learning rates and weight decay of groups, rounding and sharding work as in AdamW.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        if model.kernels.capabilities.is_async:
            raise collective_error(
                UsageError(f"the optimizer {type(self).__qualname__} requires a CPU stage")
            )
        super().__init__(model, config, own, rank, ranks)
        self._pieces = []
        for first, last, group, in_v in self._ranges.tolist():
            for at in range(first, last, UPDATED_AT_ONCE):
                end = min(last, at + UPDATED_AT_ONCE)
                self._pieces.append((slice(at, end), slice(at - first + in_v, end - first + in_v), group))

    def update(self, p: Array, m: Array, v: Array, g: Array, lr: float, decay: float) -> None:
        """Update p, m and v in place. `g` is already clipped; multiply p by `decay`."""
        raise NotImplementedError

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        super().prepare(step, lr, grad_scale, norm_scale)
        self._correction = 1 - self.config.beta1 ** (step + 1)  # AdamW's step sizes are divided by this

    def apply(self) -> None:
        scale = clipped(self.norm, self._scalars)
        if scale is None:
            return
        model = self.model
        p, m, v, g = model.masters(self.own), self.m.flat, self.v.flat, model.grads.flat[self.own]
        groups = self._scalars[len(StepScalars._fields) :].reshape(-1, 2)

        def work(i: int) -> None:
            here, second, group = self._pieces[i]
            step_size, decay = groups[group].tolist()
            self.update(p[here], m[here], v[second], g[here] * scale, step_size * self._correction, decay)

        model.kernels.each(work, len(self._pieces))
        if model.has_low_precision_copy:
            model.kernels.cast_down(model.params.flat[self.own], p)


def step_scalars(
    config: TrainConfig, step: int, lr: float, grad_scale: float, norm_scale: float
) -> list[float]:
    """Return the hyperparameters of a step of AdamW (arXiv 1711.05101), as `Kernels.adamw` reads them.

    Step sizes include the bias correction of the first moment, which saves kernels a division.
    """
    scalars = StepScalars(
        grad_scale,
        clip=clip_norm(config, grad_scale, norm_scale),
        inv_sqrt_bias_correction=(1 - config.beta2 ** (step + 1)) ** -0.5,
    )
    correction = 1 - config.beta1 ** (step + 1)
    peaks = {  # 0: `config.lr`
        EMBEDDING: config.embedding_lr,
        VALUES: config.value_lr or config.embedding_lr,
        HEAD: config.head_lr,
        VECTOR: config.vector_lr,
    }
    values = list(scalars)
    for group in GROUPS:
        peak = peaks.get(group)
        rate = peak * (lr / config.lr) if peak else lr  # all groups follow one schedule
        decay = 0.0
        if group != VECTOR and config.optimizer == "adamw":
            decay = rate * config.weight_decay
        elif group in (VALUES, HEAD):  # input embeddings do not decay with Muon
            decay = lr * config.table_decay
        values += [rate / correction, 1 - decay]
    return values


def clip_norm(config: TrainConfig, grad_scale: float, norm_scale: float) -> float:
    """Return the norm to clip to, in the unit of the gradients, in which kernels compare it."""
    return config.clip * (grad_scale / norm_scale)


def linear(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (1 - progress)


def cosine(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (0.5 * (1 + math.cos(math.pi * progress)))


# (peak, last, progress of the decay from 0 to 1) → learning rate. "wsd" decays only in the last
# `decay_fraction` of the run.
SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "wsd": linear,
    "constant": lambda peak, last, progress: peak,
}


def learning_rate(config: TrainConfig, step: int, elapsed: float | None = None) -> float:
    """Return the learning rate of a step, counted from 0: a linear warmup, then the schedule.

    The schedule follows the steps or, if given, the fraction of the run's time that has `elapsed`, from 0 to
    1. That fraction includes the warmup, so a schedule that decays from the start drops slightly at the end
    of the warmup.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    constant = 1 - config.decay_fraction if config.schedule == "wsd" else 0.0  # constant part of the run
    if elapsed is None:
        begin = max(config.warmup, round(config.steps * constant))
        progress = (step - begin) / max(1, config.steps - begin)
    else:
        progress = (elapsed - constant) / max(1e-9, 1 - constant)
    return SCHEDULES[config.schedule](config.lr, config.min_lr, min(1.0, max(0.0, progress)))


def _moment(layout: Layout, own: slice | None, kernels: Kernels) -> FlatBuffer | FlatPart:
    if own is None:
        return FlatBuffer(layout, kernels.accum_zeros)
    return FlatPart(layout, own, kernels.accum_zeros)

"""AdamW on the flat buffers, clipping by global norm, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import shared
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

UPDATED_AT_ONCE = 1 << 16  # elements, by one worker: they fit into its cache


class AdamW:
    """Owns the two moments of every parameter.

    With `own`, those of this part alone: other ranks have the rest, and `apply` changes only this part.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        """`rank` of `ranks` is for Muon, whose ranks share the work. AdamW computes all updates on each."""
        self.model = model
        self.config = config
        model.make_gradients()
        k = model.kernels
        layout = model.layout
        self.own = own or slice(0, layout.size)
        self.m = _moment(layout, own, k)
        # For AdamW alone v would be as long as m, and lie alike. Muon, which extends this class, has fewer
        # second moments: then a tensor lies elsewhere in v than in p, and so does this rank's part.
        second = self.second_moments(layout)
        first = layout.position_in(second, self.own.start)
        self.v_own = slice(first, layout.position_in(second, self.own.stop))
        self.v = _moment(second, own and self.v_own, k)
        self.norm = k.scalars(1)  # Σ g² of the last step
        self._scalars = k.scalars(len(StepScalars._fields) + 2 * len(GROUPS))
        rows = [  # of `AdamState.ranges`
            (start, stop, group, layout.position_in(second, self.own.start + start) - first)
            for start, stop, group in layout.ranges(self.group_number, self.own)
        ]
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

    def step(self, step: int, grad_scale: float, lr: float | None = None) -> None:
        """Compute the norm and update the parameters. `lr`: the learning rate, if not the schedule's."""
        lr = learning_rate(self.config, step) if lr is None else lr
        self.compute_norm()
        self.prepare(step, lr, grad_scale, grad_scale)
        self.apply()

    def compute_norm(self) -> None:
        """norm ← Σ g²"""
        self._norm_pass()

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        """Begin an update with grad_scale · gradients, clipped as if their norm were norm_scale · √norm.

        The two differ where ranks do not sum their gradients at each step: each takes its own, and all clip
        by the root mean square of their norms.
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
    """An optimizer that updates each element by itself, with NumPy on CPUs: an extension writes `update`.

    Clipping, the learning rates and the decay of groups, rounding and sharding are those of AdamW.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        if model.kernels.capabilities.is_async:
            raise shared(UsageError(f"the optimizer {type(self).__qualname__} is for CPUs"))
        super().__init__(model, config, own, rank, ranks)
        self._pieces = []
        for first, last, group, in_v in self._ranges.tolist():
            for at in range(first, last, UPDATED_AT_ONCE):
                end = min(last, at + UPDATED_AT_ONCE)
                self._pieces.append((slice(at, end), slice(at - first + in_v, end - first + in_v), group))

    def update(self, p: Array, m: Array, v: Array, g: Array, lr: float, decay: float) -> None:
        """Update parameters and moments in place; `g` is clipped, and p is to be multiplied by `decay`."""
        raise NotImplementedError

    def prepare(self, step: int, lr: float, grad_scale: float, norm_scale: float) -> None:
        super().prepare(step, lr, grad_scale, norm_scale)
        self._correction = 1 - self.config.beta1 ** (step + 1)  # which AdamW's step sizes are divided by

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

    A step size carries the bias correction of the first moment: kernels need one division less.
    """
    scalars = StepScalars(
        grad_scale,
        clip=clip_norm(config, grad_scale, norm_scale),
        inv_sqrt_bias_correction=(1 - config.beta2 ** (step + 1)) ** -0.5,
    )
    correction = 1 - config.beta1 ** (step + 1)
    peaks = {  # 0: as all others, `config.lr`
        EMBEDDING: config.embedding_lr,
        VALUES: config.value_lr or config.embedding_lr,
        HEAD: config.head_lr,
        VECTOR: config.vector_lr,
    }
    values = list(scalars)
    for group in GROUPS:
        peak = peaks.get(group)
        rate = peak * (lr / config.lr) if peak else lr  # all follow one schedule
        decay = 1.0
        if group != VECTOR and config.optimizer == "adamw":  # with Muon embeddings do not decay either
            decay = 1 - rate * config.weight_decay
        values += [rate / correction, decay]
    return values


def clip_norm(config: TrainConfig, grad_scale: float, norm_scale: float) -> float:
    """Return the norm to clip to, in the unit that kernels compare with: the gradients'."""
    return config.clip * (grad_scale / norm_scale)


def linear(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (1 - progress)


def cosine(peak: float, last: float, progress: float) -> float:
    return last + (peak - last) * (0.5 * (1 + math.cos(math.pi * progress)))


# The learning rate from the peak, the last one, and the progress of the fall, 0 to 1. "wsd" falls only in the
# last `decay_fraction` of the run.
SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "wsd": linear,
    "constant": lambda peak, last, progress: peak,
}


def learning_rate(config: TrainConfig, step: int, elapsed: float | None = None) -> float:
    """Return the learning rate of a step, from 0 on: a linear warm-up, then the schedule.

    The schedule follows the steps, or the fraction of the run's time that has `elapsed`, from 0 to 1. That
    fraction includes the time of the warm-up. So the rate drops where the warm-up ends, if the schedule falls
    from the beginning: by little, for a warm-up is a small part of a run.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    constant = 1 - config.decay_fraction if config.schedule == "wsd" else 0.0  # this part of the run
    if elapsed is None:
        begin = max(config.warmup, round(config.steps * constant))
        progress = (step - begin) / max(1, config.steps - begin)
    else:
        progress = (elapsed - constant) / max(1e-9, 1 - constant)
    return SCHEDULES[config.schedule](config.lr, config.min_lr, min(1.0, max(0.0, progress)))


def _moment(layout: Layout, own: slice | None, kernels: Kernels) -> FlatBuffer | FlatPart:
    if own is None:
        return FlatBuffer(layout, kernels.wide_zeros)
    return FlatPart(layout, own, kernels.wide_zeros)

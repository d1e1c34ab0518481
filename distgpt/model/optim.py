"""AdamW and the outer step on the flat buffers, clipping by global norm, and learning-rate schedules."""

from __future__ import annotations

import math

import numpy as np

from distgpt.config import TrainConfig
from distgpt.kernels.api import AdamConstants, AdamState, OuterState, StepScalars
from distgpt.model.memory import FlatBuffer, FlatPart
from distgpt.model.model import Model


class AdamW:
    """Owns the two moments of every parameter, laid out like the parameters themselves.

    With `own`, those of this part alone: other ranks have the rest, and `update` changes only this part.
    """

    def __init__(
        self, model: Model, config: TrainConfig, own: slice | None = None, outer: Outer | None = None
    ) -> None:
        self.model, self.config, self.outer = model, config, outer
        k, layout = model.kernels, model.layout
        self.own = own or slice(0, layout.size)
        self.m, self.v = (
            FlatPart(layout, own, k.wide_zeros) if own else FlatBuffer(layout, k.wide_zeros) for _ in range(2)
        )
        self.norm = k.scalars(1)  # Σ g² of the last step
        self._scalars = k.scalars(len(StepScalars._fields))
        self._stretches = k.integers(np.reshape(layout.stretches(own), (-1, 3)), "int64")
        self._record_norm = k.record(self._launch_norm)
        self._update = k.record(self._launch)

    @property
    def is_part(self) -> bool:
        """True if other ranks have the rest of the moments."""
        return isinstance(self.m, FlatPart)

    def step(self, step: int, grad_scale: float) -> float:
        """Compute the norm and update the parameters; return the learning rate used."""
        self.compute_norm()
        return self.update(step, grad_scale, grad_scale)

    def compute_norm(self) -> None:
        """norm ← Σ g²"""
        self._record_norm()

    def update(self, step: int, grad_scale: float, norm_scale: float) -> float:
        """Update the parameters with grad_scale · gradients, clipped; return the learning rate used.

        They are clipped as if their norm were norm_scale · √norm; if it is not finite, nothing is updated.
        """
        lr = learning_rate(self.config, step)
        values = step_scalars(self.config, step, lr, grad_scale, norm_scale)
        self.model.kernels.put(self._scalars, np.array(values))
        self._update()
        return lr

    def _launch_norm(self) -> None:
        self.model.kernels.sum_squares(self.norm, self.model.grads.flat)

    def _launch(self) -> None:
        model, c, own = self.model, self.config, self.own
        low = model.params.flat[own] if model.has_low_precision_copy else None
        p, g = model.precise(own), model.grads.flat[own]
        state = AdamState(p, low, self.m.flat, self.v.flat, g, self._stretches)
        model.kernels.adamw(state, self.norm, self._scalars, AdamConstants(c.beta1, c.beta2, c.eps))


class Outer:
    """Takes a step by Nesterov momentum along the mean change of weights that began a round alike."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self._model, self._config = model, config
        wide = model.kernels.wide_zeros
        self.round_start, self.velocity = (FlatBuffer(model.layout, wide) for _ in range(2))
        self.in_sync = True  # no rank has changed its weights since

    def begin(self) -> None:
        """Begin a first round with the weights as they are."""
        k = self._model.kernels
        k.zero(self.velocity.flat)
        k.put(self.round_start.flat, k.to_host(self._model.weights.flat))
        self.in_sync = True

    def store_change_as_gradient(self) -> None:
        """Gradients ← this rank's weights - those at the round's start."""
        model = self._model
        model.kernels.subtract(model.grads.flat, model.weights.flat, self.round_start.flat)

    def step(self, ranks: int) -> None:
        """Take the outer step once these changes are summed; the next round begins."""
        model, c = self._model, self._config
        low = None if model.params is model.weights else model.params.flat
        buffers = (self.round_start.flat, self.velocity.flat, model.grads.flat)
        state = OuterState(model.weights.flat, low, *buffers)
        model.kernels.nesterov(state, 1 / ranks, c.outer_lr, c.outer_momentum)
        self.in_sync = True


def step_scalars(
    config: TrainConfig, step: int, lr: float, grad_scale: float, norm_scale: float
) -> StepScalars:
    """Return the hyperparameters of a step; step_size carries the bias correction of the first moment."""
    return StepScalars(
        grad_scale,
        clip=config.clip * (grad_scale / norm_scale),  # as the kernels scale the norm like the gradients
        step_size=lr / (1 - config.beta1 ** (step + 1)),
        decay_factor=1 - lr * config.weight_decay,
        inv_sqrt_bias_correction=(1 - config.beta2 ** (step + 1)) ** -0.5,
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, from 0 on: a linear warm-up, then the schedule down to min_lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left

"""AdamW on the flat buffers, gradient clipping by global norm, and learning-rate schedules."""

from __future__ import annotations

import math

import numpy as np

from distgpt.config import TrainConfig
from distgpt.kernels.api import KNOBS, AdamConstants, AdamState
from distgpt.model.memory import FlatBuffer, FlatPart
from distgpt.model.model import Model


class AdamW:
    """Owns the two moments of every parameter, laid out like the parameters themselves.

    Or of a part of them, `own`: then other ranks have the rest, and `update` changes this part alone.
    """

    def __init__(self, model: Model, config: TrainConfig, own: slice | None = None) -> None:
        self.model, self.config = model, config
        k, layout = model.kernels, model.layout
        self.own = own or slice(0, layout.size)
        self.m, self.v = (
            FlatPart(layout, own, k.wide_zeros) if own else FlatBuffer(layout, k.wide_zeros) for _ in range(2)
        )
        self.norm = k.scalars(1)  # Σ g² of the last step
        self._knobs = k.scalars(len(KNOBS))
        self._stretches = k.integers(np.reshape(layout.stretches(own), (-1, 3)), "int64")
        self.measure = k.record(self._measure)  # norm ← Σ g²
        self._update = k.record(self._launch)

    @property
    def is_part(self) -> bool:
        """Whether other ranks have the rest of the moments."""
        return isinstance(self.m, FlatPart)

    def step(self, step: int, grad_scale: float) -> float:
        """Measure the gradients and update the parameters; return the learning rate used."""
        self.measure()
        return self.update(step, grad_scale)

    def update(self, step: int, grad_scale: float) -> float:
        """Update the parameters with grad_scale · gradients, clipped; return the learning rate used.

        Where the gradients are not finite, and `norm` then isn't either, nothing is updated.
        """
        lr = learning_rate(self.config, step)
        self.model.kernels.put(self._knobs, np.array(knobs(self.config, step, grad_scale, lr)))
        self._update()
        return lr

    def _measure(self) -> None:
        self.model.kernels.sum_squares(self.norm, self.model.grads.flat)

    def _launch(self) -> None:
        model, c, own = self.model, self.config, self.own
        low = None if model.params is model.weights else model.params.flat[own]
        p, g = model.weights.flat[own], model.grads.flat[own]
        state = AdamState(p, low, self.m.flat, self.v.flat, g, self._stretches)
        model.kernels.adamw(state, self.norm, self._knobs, AdamConstants(c.beta1, c.beta2, c.eps))


def knobs(config: TrainConfig, step: int, grad_scale: float, lr: float) -> tuple[float, ...]:
    """The hyperparameters of a step in the order of KNOBS; step_size and root carry the bias corrections."""
    step_size = lr / (1 - config.beta1 ** (step + 1))
    root = (1 - config.beta2 ** (step + 1)) ** -0.5
    return grad_scale, config.clip, step_size, 1 - lr * config.weight_decay, root


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up, then the schedule down to min_lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left

"""AdamW on the flat buffers, gradient clipping by global norm, and learning-rate schedules."""

from __future__ import annotations

import math

import numpy as np

from distgpt.config import TrainConfig
from distgpt.memory import FlatBuffer
from distgpt.model import Model


class AdamW:
    """Owns the two moments of every parameter, laid out like the parameters themselves."""

    def __init__(self, model: Model, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.m = FlatBuffer(model.layout, model.kernels.zeros)
        self.v = FlatBuffer(model.layout, model.kernels.zeros)
        self._runs = np.array(list(model.layout.runs()), np.int64)

    def gradient_norm(self, grad_scale: float) -> float:
        """The length of grad_scale · gradients, all tensors together."""
        return math.sqrt(self.model.kernels.sum_squares(self.model.grads.flat)) * grad_scale

    def step(self, step: int, grad_scale: float, grad_norm: float) -> float:
        """Update the parameters with grad_scale · gradients, clipped; gives the learning rate used."""
        c = self.config
        if c.clip and grad_norm > c.clip:
            grad_scale *= c.clip / grad_norm
        lr = learning_rate(c, step)
        self.model.kernels.adamw(
            self.model.params.flat,
            self.m.flat,
            self.v.flat,
            self.model.grads.flat,
            self._runs,
            grad_scale,
            lr,
            c.beta1,
            c.beta2,
            c.eps,
            c.weight_decay,
            step + 1,
        )
        return lr


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear warm-up, then the schedule down to min_lr at the end."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * left

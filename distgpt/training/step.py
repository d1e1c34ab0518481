"""One training step on one rank: forward and backward over its rows, the exchange, the update.

Nothing in it waits for a result, so that a backend with a queue is given the next step while it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.data.batches import Batches, rank_rows
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Pass
from distgpt.training.gradsync import GRAD_SYNCS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step found, once it is done: the mean loss over all ranks, the gradient's norm, the rate."""

    lr: float
    _scale: float
    _loss: Callable[[], Any]
    _norm: Callable[[], Any]

    def read(self) -> tuple[float, float]:
        """(loss, gradient norm). Waits for the step."""
        return float(self._loss()[0]) * self._scale, math.sqrt(float(self._norm()[0])) * self._scale


class Step:
    """Owns the memory of a step. `batch_size` of the configuration counts over all ranks and rounds;
    `grad_accum` and `recompute` are what "automatic" came to."""

    def __init__(self, model: Model, optimizer: AdamW, comm: Comm, config: TrainConfig) -> None:
        self.model, self.optimizer, self.comm, self.config = model, optimizer, comm, config
        k, seq_len = model.kernels, model.config.seq_len
        self._rounds = config.grad_accum or 1
        n_seq = config.batch_size // (self._rounds * comm.size)
        self._host = tuple(np.empty((n_seq, seq_len), np.int32) for _ in range(2))
        self._tokens, self._targets = (k.integers(np.zeros(n_seq * seq_len)) for _ in range(2))
        self._work = Pass(model, n_seq, seq_len, training=True, recompute=config.recompute)
        self._first, self._further = (k.record(partial(self._gradients, turn)) for turn in (False, True))

    def launch(self, step: int, batches: Batches) -> Outcome:
        """Do, or put into the backend's queue, step number `step`, counted from 0. Collective."""
        c, k = self.config, self.model.kernels
        for turn in range(self._rounds):
            rows = rank_rows(c.batch_size, self.comm.rank, self.comm.size, turn, self._rounds)
            batches.fill(step, rows, *self._host)
            for device, host in zip((self._tokens, self._targets), self._host, strict=True):
                k.put(device, host.reshape(-1))
            (self._further if turn else self._first)()
        grads = self.model.grads
        grad_scale = GRAD_SYNCS[c.grad_sync](self.comm, grads.whole)
        lr = self.optimizer.step(step, grad_scale)
        return Outcome(lr, grad_scale, k.later(grads.extra), k.later(self.optimizer.norm))

    def _gradients(self, accumulate: bool) -> None:
        self._work.loss_and_gradients(self._tokens, self._targets, 1 / self._rounds, accumulate=accumulate)

"""One training step on one rank: forward and backward over its rows, the exchange, the update.

Nothing here waits for a result, so that a backend with a queue can begin the next step meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from distgpt.comm.agree import gather_bytes
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.data.batches import Batches, rank_rows, shared_rows
from distgpt.kernels.api import Array
from distgpt.model.model import FLAG_COUNT
from distgpt.model.optim import AdamW, learning_rate
from distgpt.model.passes import Pass, Ready
from distgpt.training.exchange.api import Exchange
from distgpt.training.exchange.local_steps import is_local
from distgpt.training.exchange.reproducible import Tree
from distgpt.training.guards.recheck import Recheck
from distgpt.training.guards.watchdog import COMPUTING, EXCHANGING, UPDATING, Activity

Flags = Callable[[], Sequence[float]]
Objection = Callable[[float, float], str]


def no_flags() -> Sequence[float]:
    return (0.0,) * (FLAG_COUNT - 1)


@dataclass(slots=True)
class StepResult:
    """A step's learning rate and, once it is done, its mean loss over all ranks and its gradient norm.

    `rejected` is the reason why the weights were not updated, "" if they were, None if nobody has judged.
    """

    lr: float
    _loss_scale: float
    _norm_scale: float
    _numbers: Callable[[], Any]  # the loss and the flags, summed over the ranks
    _squares: Callable[[], Any]
    rejected: str | None = None

    def read(self) -> tuple[float, float]:
        """Wait for the step and return (loss, gradient norm)."""
        norm = math.sqrt(float(self._squares()[0])) * self._norm_scale
        return float(self._numbers()[0]) * self._loss_scale, norm

    def flags(self) -> Any:
        """Return the ranks' flags, each summed over the ranks. Call `read` first."""
        return self._numbers()[1:FLAG_COUNT]

    def seconds(self) -> Any:
        """Return each rank's seconds from one exchange to the next, none if unknown. Call `read` first."""
        return self._numbers()[FLAG_COUNT:]


class Step:
    """Owns the memory of a step.

    `config.batch_size` counts sequences over all ranks and micro-batches. `config.grad_accum` and
    `config.recompute` are resolved: no longer automatic.
    """

    def __init__(
        self,
        optimizer: AdamW,
        comm: Comm,
        config: TrainConfig,
        exchange: Exchange,
        *,
        shares: Sequence[int] | None = None,
        objection: Objection | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`shares`: sequences of each rank in a micro-batch, if they differ. `objection(loss, norm)` returns
        why a step must not change the weights, "" if it may; it makes each step wait for its result."""
        self.optimizer, self.model, self.comm, self.config = optimizer, optimizer.model, comm, config
        self.exchange, self._objection, self.activity = exchange, objection, activity or Activity()
        self.at_rest = threading.Lock()  # held while weights change: whoever else holds it may read them
        k, seq_len = self.model.kernels, self.model.config.seq_len
        self._micro_batches = config.grad_accum or 1
        self._shares = shares or even_shares(config, comm.size)
        n_seq = self._shares[comm.rank]
        # Gradients are the mean over this rank's rows. The update takes the mean over the ranks.
        weight = n_seq * comm.size / config.batch_size
        self._weight = 1 / config.reproducible_parts if config.reproducible_parts else weight
        # Tokens, targets and, for examples side by side, positions.
        self._host = tuple(
            np.zeros((n_seq, seq_len), np.int32) for _ in range(3 if config.is_of_examples else 2)
        )
        self._inputs = tuple(k.integers(np.zeros(n_seq * seq_len)) for _ in self._host)
        positions = self._inputs[2] if config.is_of_examples else None
        how: dict[str, Any] = {"training": True, "recompute": config.recompute, "positions": positions}
        self._pass = Pass(self.model, n_seq, seq_len, **how)
        self._tree = (
            Tree(self.model.grads, k, self._micro_batches) if config.reproducible_parts > comm.size else None
        )
        self._recheck = Recheck(comm, self.model, config)
        self._ready: Ready | None = None  # called by the backward pass that is running
        # Recorded passes, by (adds to the gradients, sends them during the pass).
        self._passes = {
            how: k.record(partial(self._gradients, how[0])) for how in product((False, True), repeat=2)
        }
        self._launched, self._had_flags = 0, False
        self._exchanged_at: float | None = None

    def launch(
        self, number: int, batches: Batches, flags: Flags = no_flags, elapsed: float | None = None
    ) -> StepResult:
        """Do step `number`, counted from 0, or put it into the backend's queue. Collective.

        `flags` is called just before the exchange. Its numbers are summed over the ranks, with the gradients.
        `elapsed`: the fraction of the run's time that is over, where the learning rate follows the clock.
        """
        self._agree_on_tuning()
        self._exchanged_at = self._exchanged_at or time.perf_counter()
        compare = self._recheck.begin(number, partial(self._compute, number, batches, 0))
        for micro_batch in range(self._micro_batches):
            if micro_batch == self._micro_batches - 1:
                self.exchange.before_backward(number)
                self._ready = None if compare else self.exchange.ready
            self._compute(number, batches, micro_batch, self.comm.rank)
            self._ready = None
            if compare and not micro_batch:
                self.activity.enter(EXCHANGING)
                compare()
            if self._tree:
                self._tree.add(micro_batch)
        self._put([*flags(), *self._seconds()])
        self.activity.enter(EXCHANGING)
        self.exchange.sum_gradients(number)
        self._exchanged_at = time.perf_counter()
        with self.at_rest:
            learned = batches.learned_fraction(number)
            return self._update(number, learning_rate(self.config, number, elapsed), learned)

    def waits(self) -> list[tuple[Any, str, Array]]:
        """Return the methods that wait for other ranks, each with what it sums or sends."""
        grads, params = self.model.grads, self.model.params.flat
        arrays = {
            "sum_gradients": grads.with_flags,
            "after_update": params,
            "sum_flags": grads.flags,
            "sum_changes": grads.flat,
        }
        waits: list[tuple[Any, str, Array]] = [
            (self.exchange, name, arrays[name]) for name in self.exchange.waits()
        ]
        return [*waits, (self, "gather_updates", grads.flat)] if self.optimizer.update_bounds else waits

    def gather_updates(self) -> None:
        """Send the updates that this rank has computed to all, where each rank computes some of them."""
        if bounds := self.optimizer.update_bounds:
            self.activity.enter(EXCHANGING)
            self.comm.all_gather(self.model.grads.flat, bounds)
            self.activity.enter(UPDATING)

    def _compute(self, number: int, batches: Batches, micro_batch: int, rank: int) -> None:
        """Add the gradients of a rank's micro-batch to those of the micro-batches before it."""
        self.activity.enter(COMPUTING)
        c = self.config
        if c.reproducible_parts:
            rows = rank_rows(
                c.batch_size, rank * self._micro_batches + micro_batch, c.reproducible_parts, 0, 1
            )
        else:
            rows = shared_rows(self._shares, rank, micro_batch)
        batches.fill(number, rows, *self._host)
        for device, host in zip(self._inputs, self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        self._passes[bool(micro_batch and not c.reproducible_parts), self._ready is not None]()

    def _gradients(self, accumulate: bool) -> None:
        tokens, targets = self._inputs[:2]
        self._pass.loss_and_gradients(tokens, targets, self._weight, accumulate, self._ready)

    def _update(self, number: int, lr: float, learned: float) -> StepResult:
        """Update the weights, unless the summed gradients are bad.

        The gradients are those of a mean over all tokens of the batch, of which `learned` is the part that
        counts: the mean is to be over these.
        """
        c, k, grads = self.config, self.model.kernels, self.model.grads
        self.activity.enter(UPDATING)
        # The optimizer takes the mean in its only pass over the gradients; units are weighted from the start.
        mean = (1.0 if c.reproducible_parts else 1.0 / self.comm.size) / learned
        grad_scale, norm_scale = mean, mean
        if is_local(c, self.comm.size):  # then norm² is the mean of those of the ranks
            grad_scale, norm_scale = 1.0 / learned, math.sqrt(1.0 / self.comm.size) / learned
        self.exchange.compute_norm(self.optimizer)
        numbers, squares = k.later(grads.flags), k.later(self.optimizer.norm)
        result = StepResult(lr, mean, norm_scale, cache(numbers), cache(squares))
        if self._objection:
            result.rejected = self._objection(*result.read())
        if not result.rejected:
            self.optimizer.prepare(number, lr, grad_scale, norm_scale)
            self.gather_updates()
            self.optimizer.apply()
        if self.optimizer.is_part or is_local(c, self.comm.size):
            self.activity.enter(EXCHANGING)
        self.exchange.after_update(number, not result.rejected)
        return result

    # Beside the step itself

    def _agree_on_tuning(self) -> None:
        """Before the second step all kernels have been tuned and no exchange is running: ranks can agree."""
        if self._launched == 1:
            self.model.kernels.agree(partial(gather_bytes, self.comm))
        self._launched += 1

    def _put(self, numbers: list[float]) -> None:
        """Append them to the gradients; where all are 0, as nearly always, they are there already."""
        if any(numbers) or self._had_flags:
            k = self.model.kernels
            k.put(self.model.grads.flags[1 : 1 + len(numbers)], np.array(numbers, k.wide))
            self._had_flags = any(numbers)

    def _seconds(self) -> list[float]:
        """Return this rank's seconds since the last exchange, 0 for others; [] where a queue hides it."""
        if self.comm.size == 1 or self.model.kernels.capabilities.is_async:
            return []
        assert self._exchanged_at
        seconds = [0.0] * self.comm.size
        seconds[self.comm.rank] = time.perf_counter() - self._exchanged_at
        return seconds


def even_shares(t: TrainConfig, ranks: int) -> list[int]:
    """Return the sequences of each rank in a micro-batch, the same number for all."""
    return [t.batch_size // ((t.grad_accum or 1) * ranks)] * ranks

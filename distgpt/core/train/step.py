"""One training step on one rank: forward and backward over its rows, the exchange, the update.

Nothing here waits for a result, so that a backend with a queue can begin the next step meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import Batches
from distgpt.core.model.model import FLAG_COUNT
from distgpt.core.model.optim import AdamW, learning_rate
from distgpt.core.model.passes import Pass, Ready
from distgpt.core.ops.api import Array
from distgpt.core.train.progress import COMPUTING, EXCHANGING, UPDATING, Activity, Finished
from distgpt.core.train.seams import Inspector
from distgpt.core.train.sharing import Exchange, MicroBatches

Flags = Callable[[], Sequence[float]]
Objection = Callable[[float, float], str]
Launch = Callable[[int, Batches, Flags, float | None], "StepResult"]


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

    def then(self, call: Callable[[], None]) -> StepResult:
        """Return this result with a call that is made once, as soon as it was read."""

        def numbers() -> Any:  # what `read` waits for last
            found = self._numbers()
            call()
            return found

        return replace(self, _numbers=cache(numbers))

    def flags(self) -> list[float]:
        """Return the ranks' flags, each summed over the ranks. Call `read` first."""
        return list(map(float, self._numbers()[1:FLAG_COUNT]))

    def rank_seconds(self) -> list[float]:
        """Return each rank's seconds from one exchange to the next, none if unknown. Call `read` first."""
        return list(map(float, self._numbers()[FLAG_COUNT:]))


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
        micro_batches: MicroBatches | None = None,
        objection: Objection | None = None,
        inspector: Inspector | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`objection(loss, norm)` returns why a step must not change the weights, "" if it may; it makes each
        step wait for its result. `inspector` checks the computed gradients."""
        self.optimizer, self.model, self.comm, self.config = optimizer, optimizer.model, comm, config
        self.exchange, self._objection, self.activity = exchange, objection, activity or Activity()
        self.at_rest = threading.Lock()  # held while weights change: whoever else holds it may read them
        k, seq_len = self.model.kernels, self.model.config.seq_len
        self._micro_batches = micro_batches or MicroBatches(config, comm.size)
        n_seq = self._micro_batches.sequences
        # Tokens, targets and, for examples side by side, positions.
        self._host = tuple(
            np.zeros((n_seq, seq_len), np.int32) for _ in range(3 if config.is_of_examples else 2)
        )
        self._inputs = tuple(k.integers(np.zeros(n_seq * seq_len)) for _ in self._host)
        positions = self._inputs[2] if config.is_of_examples else None
        self._pass = Pass(
            self.model, n_seq, seq_len, training=True, recompute=config.recompute, positions=positions
        )
        self._inspector = inspector
        self._ready: Ready | None = None  # called by the backward pass that is running
        # Recorded forward and backward passes: a recording fixes whether it adds to the gradients that are
        # there, and whether it sends them meanwhile, and the first micro-batch and the last one differ.
        self._recorded = {
            (adds, sends): k.record(partial(self._forward_backward, adds))
            for adds in (False, True)
            for sends in (False, True)
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
        compute = partial(self._compute, number, batches, 0)
        compare = self._inspector.begin(number, compute) if self._inspector else None
        for micro_batch in range(self._micro_batches.count):
            if micro_batch == self._micro_batches.count - 1:
                self.exchange.before_backward(number)
                self._ready = None if compare else self.exchange.ready
            self._compute(number, batches, micro_batch, self.comm.rank)
            self._ready = None
            if compare and not micro_batch:
                self.activity.enter(EXCHANGING)
                compare()
            self._micro_batches.done(micro_batch)
        self._put([*flags(), *self._seconds()])
        self.activity.enter(EXCHANGING)
        self.exchange.sum_gradients(number)
        self._exchanged_at = time.perf_counter()
        with self.at_rest:
            learned = batches.learned_fraction(number)
            return self._update(number, learning_rate(self.config, number, elapsed), learned)

    def waits(self) -> list[tuple[Any, str, Array]]:
        """Return the methods that wait for other ranks, each with what it sums or sends."""
        waits: list[tuple[Any, str, Array]] = [
            (self.exchange, name, array) for name, array in self.exchange.waits(self.model)
        ]
        if self.optimizer.update_bounds:
            waits.append((self, "gather_updates", self.model.grads.flat))
        return waits

    def gather_updates(self) -> None:
        """Send the updates that this rank has computed to all, where each rank computes some of them."""
        if bounds := self.optimizer.update_bounds:
            self.activity.enter(EXCHANGING)
            self.comm.all_gather(self.model.grads.flat, bounds)
            self.activity.enter(UPDATING)

    def _compute(self, number: int, batches: Batches, micro_batch: int, rank: int) -> None:
        """Add the gradients of a rank's micro-batch to those of the micro-batches before it."""
        self.activity.enter(COMPUTING)
        batches.fill(number, self._micro_batches.rows(rank, micro_batch), *self._host)
        for device, host in zip(self._inputs, self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        run_forward_backward = self._recorded[self._micro_batches.adds(micro_batch), self._ready is not None]
        run_forward_backward()

    def _forward_backward(self, adds: bool) -> None:
        """Compute the loss and gradients of the rows that lie in `_inputs`."""
        tokens, targets = self._inputs[:2]
        self._pass.loss_and_gradients(tokens, targets, self._micro_batches.weight, adds, self._ready)

    def _update(self, number: int, lr: float, learned: float) -> StepResult:
        """Update the weights, unless the summed gradients are bad.

        The gradients are those of a mean over all tokens of the batch, of which `learned` is the part that
        counts: the mean is to be over these.
        """
        k, grads = self.model.kernels, self.model.grads
        self.activity.enter(UPDATING)
        scales = self.exchange.scales(learned)
        self.exchange.compute_norm(self.optimizer)
        numbers, squares = k.later(grads.flags), k.later(self.optimizer.norm)
        result = StepResult(lr, scales.loss, scales.norm, cache(numbers), cache(squares))
        if self._objection:
            result.rejected = self._objection(*result.read())
        if not result.rejected:
            self.optimizer.prepare(number, lr, scales.gradients, scales.norm)
            self.gather_updates()
            self.optimizer.apply()
        if self.exchange.waits_after_update:
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


class InFlight:
    """At most `depth` steps may be under way when the next one is launched."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._results: deque[StepResult] = deque()
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: StepResult) -> None:
        self._results.append(result)

    def wait(self) -> Finished:
        """Wait for the oldest step."""
        result, begun = self._results.popleft(), self._finished_at
        loss, norm = result.read()
        self.restart_clock()
        flags, rank_seconds = result.flags(), result.rank_seconds()
        return Finished(
            loss, norm, result.lr, result.rejected, flags, rank_seconds, self._finished_at - begun
        )

    def restart_clock(self) -> None:
        """Count the next step's time from now on."""
        self._finished_at = time.perf_counter()

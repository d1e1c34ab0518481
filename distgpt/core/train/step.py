"""One training step on one rank: the passes over its rows, the exchange, the update; steps in flight.

On a GPU nothing here waits for a result, so that its queue has the next step meanwhile. On a CPU `_update`
looks at loss and norm before the weights change.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import Batches
from distgpt.core.model.model import FLAG_COUNT
from distgpt.core.model.optim import AdamW, learning_rate
from distgpt.core.model.passes import Pass
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
    _numbers: Callable[[], Array]  # the loss and the flags, summed over the ranks
    _squares: Callable[[], Array]
    rejected: str | None = None

    def read(self) -> tuple[float, float]:
        """Wait for the step and return (loss, gradient norm)."""
        norm = math.sqrt(float(self._squares()[0])) * self._norm_scale
        return float(self._numbers()[0]) * self._loss_scale, norm

    def then(self, call: Callable[[], None]) -> StepResult:
        """Return this result with a call that is made once, as soon as it was read."""

        def numbers() -> Array:  # what `read` waits for last
            found = self._numbers()
            call()
            return found

        return replace(self, _numbers=cache(numbers))

    def flags(self) -> list[float]:
        """Return the ranks' flags, each summed over the ranks. Call `read` first."""
        return list(map(float, self._numbers()[1:FLAG_COUNT]))

    def rank_seconds(self) -> list[float]:
        """Return each rank's seconds between two exchanges, none if unknown. Call `read` first."""
        return list(map(float, self._numbers()[FLAG_COUNT:]))


class Step:
    """Owns the memory of a step.

    `config.batch_size` counts sequences over all ranks and micro-batches. `config.grad_accum` and
    `config.recompute` are numbers and words by now: memory.py has chosen what was automatic.
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
        # Recorded forward and backward passes: a recording fixes whether it adds to the gradients that are
        # there, and whether it sends them meanwhile, and the first micro-batch and the last one differ.
        self._recorded = {
            (adds, sends): k.record(partial(self._forward_backward, adds, sends))
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
        if self._launched == 1:  # the first step has tuned all kernels, and no exchange runs: ranks can agree
            self.model.kernels.agree(partial(gather_bytes, self.comm))
        self._launched += 1
        self._exchanged_at = self._exchanged_at or time.perf_counter()
        # First, as it may compute another rank's gradients, in the buffer that is then for this rank's.
        compute = partial(self._compute, number, batches, 0)
        compare = self._inspector.begin(number, compute) if self._inspector else None
        last = self._micro_batches.count - 1
        for micro_batch in range(last + 1):
            sends = False
            if micro_batch == last:
                self.exchange.before_backward(number)
                # Gradients that are to be compared must not be sums yet.
                sends = compare is None and self.exchange.ready is not None
            self._compute(number, batches, micro_batch, self.comm.rank, sends)
            if compare and micro_batch == 0:  # before `collect`, and before the next one adds to them
                self.activity.enter(EXCHANGING)
                compare()
            self._micro_batches.collect(micro_batch)
        self._append([*flags(), *self._seconds()])  # as late as can be: signals came meanwhile
        self.activity.enter(EXCHANGING)
        self.exchange.sum_gradients(number)
        self._exchanged_at = time.perf_counter()
        with self.at_rest:  # only now: meanwhile another thread may save the weights of the last step
            learned = batches.learned_fraction(number)
            return self._update(number, learning_rate(self.config, number, elapsed), learned)

    def waits(self) -> list[tuple[object, str, Array]]:
        """Return the methods that wait for other ranks, each with its object and what it sums or sends."""
        waits: list[tuple[object, str, Array]] = [
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

    def _compute(
        self, number: int, batches: Batches, micro_batch: int, rank: int, sends: bool = False
    ) -> None:
        """Add the gradients of a rank's micro-batch to those of the micro-batches before it.

        `sends`: whether the exchange takes gradients as they become final, within the backward pass.
        """
        self.activity.enter(COMPUTING)
        batches.fill(number, self._micro_batches.rows_of(rank, micro_batch), *self._host)
        for device, host in zip(self._inputs, self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        run_forward_backward = self._recorded[self._micro_batches.accumulates(micro_batch), sends]
        run_forward_backward()

    def _forward_backward(self, adds: bool, sends: bool) -> None:
        """Compute the loss and gradients of the rows that lie in `_inputs`."""
        tokens, targets = self._inputs[:2]
        ready = self.exchange.ready if sends else None
        self._pass.loss_and_gradients(tokens, targets, self._micro_batches.weight, adds, ready)

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
        result = StepResult(lr, scales.loss, scales.norm, cache(numbers), cache(squares))  # each is read once
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

    def _append(self, numbers: list[float]) -> None:
        """Write them behind the gradients, where several ranks find the sums of the last step."""
        if self.comm.size > 1 or any(numbers) or self._had_flags:
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
    """Steps whose results were not read yet: a GPU computes one while it gets the next.

    At most `depth` of them may be under way when the next one is launched.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._results: deque[StepResult] = deque()
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._results)

    def add_launched(self, result: StepResult) -> None:
        self._results.append(result)

    def wait_for_oldest(self) -> Finished:
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

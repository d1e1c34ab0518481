"""One training step on one rank: the passes over its sequences, the exchange, the update; steps in flight.

With an `objection`, `_update` waits for loss and norm, and asks it before the weights change: always on a
CPU, on a GPU where a judge needs that, as for spike_zscore. Without one nothing here waits for a result, so
that a GPU's queue has the next step meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import gather_bytes, shared
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import Batches
from distgpt.core.model.model import FLAG_COUNT
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Array
from distgpt.core.train.progress import COMPUTING, EXCHANGING, UPDATING, Activity, Finished
from distgpt.core.train.sharing import Exchange, MicroBatches, Scales

OwnVotes = Callable[[], Sequence[float]]  # of this rank; see `Votes` in seams.py
Objection = Callable[[float, float], str]  # (loss, norm) → why not; see `Judge` in seams.py


def no_votes() -> Sequence[float]:
    return (0.0,) * (FLAG_COUNT - 1)


class StepResult:
    """The loss and the norm of a step, once they are there.

    `rejected` is the reason why the weights were not updated, "" if they were, None if nobody has judged.
    """

    def __init__(
        self, lr: float, scales: Scales, sums: Callable[[], Array], squares: Callable[[], Array]
    ) -> None:
        """`sums`: over the ranks, of the loss, votes and seconds; `squares`: Σ g² of the summed gradients.

        Both wait for the step. Neither is scaled.
        """
        self.lr = lr
        self.rejected: str | None = None
        self._scales, self._later = scales, (squares, sums)
        self._found: tuple[float, list[float]] | None = None

    def wait(self) -> Finished:
        """Wait for the step, the first time. Its `seconds` are unknown here: see `InFlight`."""
        if self._found is None:
            square, sums = (array() for array in self._later)
            self._found = float(square[0]), [float(value) for value in sums]
        squares, values = self._found
        norm = math.sqrt(squares) * self._scales.norm
        votes, rank_seconds = values[1:FLAG_COUNT], values[FLAG_COUNT:]
        return Finished(values[0] * self._scales.loss, norm, self.lr, self.rejected, votes, rank_seconds)


Launch = Callable[[int, Batches, OwnVotes, float | None], StepResult]


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
        activity: Activity | None = None,
    ) -> None:
        """`objection(loss, norm)` is the judge's, where it needs the result before the update (setup.py). It
        returns why a step must not change the weights, "" if it may.
        """
        self.optimizer = optimizer
        self.model = optimizer.model
        self.comm = comm
        self.config = config
        self.exchange = exchange
        self._objection = objection
        self.activity = activity or Activity()
        self.weights_lock = threading.Lock()  # held while weights change: whoever else holds it may read them
        k = self.model.kernels
        seq_len = self.model.config.seq_len
        self.micro_batches = micro_batches or MicroBatches(config, comm.size)
        n_seq = self.micro_batches.n_sequences
        # Tokens, targets and, for examples side by side, positions.
        self._host = tuple(
            np.zeros((n_seq, seq_len), np.int32) for _ in range(3 if config.is_of_examples else 2)
        )
        self._inputs = tuple(k.integers(np.zeros(n_seq * seq_len)) for _ in self._host)
        positions = self._inputs[2] if config.is_of_examples else None
        self._pass = Pass(
            self.model, n_seq, seq_len, training=True, recompute=config.recompute, positions=positions
        )
        # Recorded forward and backward passes: a recording fixes whether it adds to the gradients that are
        # there, and whether it sends them meanwhile, and the first micro-batch and the last one differ.
        self._recorded = {
            (adds, sends): k.record(partial(self._forward_backward, adds, sends))
            for adds in (False, True)
            for sends in (False, True)
        }
        self.is_recorded = not any(isinstance(work, partial) for work in self._recorded.values())
        self._launched = 0
        self._has_appended = False  # whether the last step has left votes behind the gradients
        self._exchanged_at: float | None = None

    def launch(
        self, number: int, batches: Batches, votes: OwnVotes = no_votes, elapsed: float | None = None
    ) -> StepResult:
        """Do step `number`, counted from 0, or put it into the backend's queue. Collective.

        `votes` is called just before the exchange. Its votes are summed over the ranks, with the gradients.
        `elapsed`: the fraction of the run's time that is over, where the learning rate follows the clock.
        """
        # Before the second step: the first has tuned all kernels, and no exchange runs, so ranks can agree.
        if self._launched == 1:
            self.model.kernels.agree(partial(gather_bytes, self.comm))
        self._launched += 1
        self._exchanged_at = self._exchanged_at or time.perf_counter()
        last = self.micro_batches.count - 1
        for micro_batch in range(last + 1):
            sends = False
            if micro_batch == last:
                self.exchange.before_backward(number)
                sends = self.exchange.ready is not None
            self._compute(number, batches, micro_batch, sends)
            self.micro_batches.collect(micro_batch)
        self._append(votes())  # as late as can be: signals came meanwhile
        self.activity.enter(EXCHANGING)
        self.exchange.sum_gradients(number)
        self._exchanged_at = time.perf_counter()
        # Only now: if the exchange never ends, another thread may save the weights of the last step.
        with self.weights_lock:
            counted = batches.counted_fraction(number)
            rate = components().learning_rate(self.config, number, elapsed)
            if not math.isfinite(rate):
                name = type(components()).__qualname__
                raise shared(UsageError(f"{name}.learning_rate returned {rate} for step {number + 1}"))
            return self._update(number, rate, counted)

    def restart_clock(self) -> None:
        """Let what was done between two steps not count as this rank's time in the next one."""
        self._exchanged_at = None

    def gather_updates(self) -> None:
        """Send the updates that this rank has computed to all, where each rank computes some of them."""
        self.activity.enter(EXCHANGING)
        self.comm.all_gather(self.model.grads.flat, self.optimizer.update_bounds)
        self.activity.enter(UPDATING)

    def _compute(self, number: int, batches: Batches, micro_batch: int, sends: bool) -> None:
        """Add the gradients of this rank's micro-batch to those of the micro-batches before it.

        `sends`: whether the exchange takes gradients as they become final, within the backward pass.
        """
        self.activity.enter(COMPUTING)
        batches.fill(number, self.micro_batches.sequences_of(self.comm.rank, micro_batch), *self._host)
        for device, host in zip(self._inputs, self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        adds = micro_batch > 0 and self.micro_batches.accumulates
        self._recorded[adds, sends]()

    def _forward_backward(self, adds: bool, sends: bool) -> None:
        """Compute the loss and gradients of the sequences that lie in `_inputs`."""
        tokens, targets = self._inputs[:2]
        ready = self.exchange.ready if sends else None
        self._pass.loss_and_gradients(tokens, targets, self.micro_batches.weight, adds, ready)

    def _update(self, number: int, lr: float, counted: float) -> StepResult:
        """Update the weights, unless the summed gradients are bad.

        The gradients are those of a mean over all targets of the batch, of which the loss counts this
        fraction: the mean is to be over these.
        """
        k = self.model.kernels
        grads = self.model.grads
        self.activity.enter(UPDATING)
        scales = self.exchange.scales(counted)
        self.exchange.compute_norm(self.optimizer)
        sums = k.later(grads.flags)
        squares = k.later(self.optimizer.norm)
        result = StepResult(lr, scales, sums, squares)
        if self._objection:
            done = result.wait()
            result.rejected = self._objection(done.loss, done.norm)
        if not result.rejected:
            self.optimizer.prepare(number, lr, scales.gradients, scales.norm)
            if self.optimizer.update_bounds:
                self.gather_updates()
            # Where nobody was asked, the kernel itself does nothing if the norm is not finite.
            self.optimizer.apply()
        if self.exchange.waits_after_update:
            self.activity.enter(EXCHANGING)
        self.exchange.after_update(number, not result.rejected)
        return result

    def _append(self, votes: Sequence[float]) -> None:
        """Write the votes, and this rank's seconds since the last exchange, behind the gradients."""
        k = self.model.kernels
        appended = list(votes)
        if self.comm.size > 1 and not k.capabilities.is_async:  # a queue hides how long the work took
            assert self._exchanged_at
            seconds = [0.0] * self.comm.size  # 0 in the places of others: the sum has those of all ranks
            seconds[self.comm.rank] = time.perf_counter() - self._exchanged_at
            appended += seconds
        # Several ranks find the sums of the last step there. One rank finds its own votes, mostly zeros.
        if self.comm.size > 1 or any(appended) or self._has_appended:
            k.put(self.model.grads.flags[1 : 1 + len(appended)], np.array(appended, k.wide))
            self._has_appended = any(appended)


class InFlight:
    """Steps whose results were not read yet: a GPU computes one while it gets the next."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._results)

    def add_launched(self, result: StepResult) -> None:
        self._results.append(result)

    def wait_for_oldest(self) -> Finished:
        """Wait for the oldest step."""
        begun = self._finished_at
        done = self._results.popleft().wait()
        self.restart_clock()
        return done._replace(seconds=self._finished_at - begun)

    def restart_clock(self) -> None:
        """Count the next step's time from now on."""
        self._finished_at = time.perf_counter()

"""One training step on one rank: passes, exchange and update; and steps in flight.

With a `rejection_reason`, `_update` waits for loss and norm and checks them before the weights change. CPUs
always do that. GPUs do it only if a policy requires it, such as spike_zscore. Otherwise nothing here waits
for a result, so that the GPU's queue already has the next step.
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
from distgpt.core.comm.agree import collective_error, gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import Batches
from distgpt.core.model.model import FLAG_COUNT
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Array
from distgpt.core.train.parallel_strategy import GradientSync, MicroBatches, Scales
from distgpt.core.train.progress import COMPUTING, EXCHANGING, UPDATING, Activity, Finished

LocalFlags = Callable[[], Sequence[float]]  # this rank's flags (`StepFlags` in interfaces.py)
RejectionReason = Callable[[float, float], str]  # (loss, norm) → reason for rejection (`StepPolicy`)


def no_flags() -> Sequence[float]:
    return (0.0,) * (FLAG_COUNT - 1)


class StepResult:
    """The loss and the norm of a step, available after `wait`.

    `rejected` is the reason why the weights were not updated, "" if they were, or None if not checked.
    """

    def __init__(
        self, lr: float, scales: Scales, sums: Callable[[], Array], squares: Callable[[], Array]
    ) -> None:
        """`sums`: loss, flags and seconds, summed over ranks; `squares`: Σ g² of the summed gradients.

        Both wait for the step and are unscaled.
        """
        self.lr = lr
        self.rejected: str | None = None
        self._scales, self._later = scales, (squares, sums)
        self._found: tuple[float, list[float]] | None = None

    def wait(self) -> Finished:
        """Wait for the step on the first call. `seconds` is unset here; see `InFlight`."""
        if self._found is None:
            square, sums = (array() for array in self._later)
            self._found = float(square[0]), [float(value) for value in sums]
        squares, values = self._found
        norm = math.sqrt(squares) * self._scales.norm
        flags, rank_seconds = values[1:FLAG_COUNT], values[FLAG_COUNT:]
        return Finished(values[0] * self._scales.loss, norm, self.lr, self.rejected, flags, rank_seconds)


Launch = Callable[[int, Batches, LocalFlags, float | None], StepResult]


class Step:
    """Owns the memory of a step.

    `config.batch_size` counts sequences over all ranks and micro-batches. `config.grad_accum` and
    `config.recompute` must be resolved (memory.py).
    """

    def __init__(
        self,
        optimizer: AdamW,
        comm: Comm,
        config: TrainConfig,
        gradient_sync: GradientSync,
        *,
        micro_batches: MicroBatches | None = None,
        rejection_reason: RejectionReason | None = None,
        activity: Activity | None = None,
    ) -> None:
        """`rejection_reason(loss, norm)` is the policy's check, if it is needed before the update (setup.py).

        It returns why a step must not update the weights, "" if it may.
        """
        self.optimizer = optimizer
        self.model = optimizer.model
        self.comm = comm
        self.config = config
        self.gradient_sync = gradient_sync
        self._rejection_reason = rejection_reason
        self.activity = activity or Activity()
        self.weights_lock = threading.Lock()  # held while weights change, so other holders may read them
        k = self.model.kernels
        seq_len = self.model.config.seq_len
        self.micro_batches = micro_batches or MicroBatches(config, comm.size)
        n_seq = self.micro_batches.n_sequences
        # Tokens, targets and, for packed examples, positions.
        self._host = tuple(
            np.zeros((n_seq, seq_len), np.int32) for _ in range(3 if config.is_of_examples else 2)
        )
        self._inputs = tuple(k.integers(np.zeros(n_seq * seq_len)) for _ in self._host)
        positions = self._inputs[2] if config.is_of_examples else None
        self._pass = Pass(
            self.model, n_seq, seq_len, training=True, recompute=config.recompute, positions=positions
        )
        # Recorded forward and backward passes. A recording fixes whether it adds to existing gradients and
        # whether it sends them, which differs between the first and the last micro-batch.
        self._recorded = {
            (adds, sends): k.record(partial(self.forward_backward, adds, sends))
            for adds in (False, True)
            for sends in (False, True)
        }
        self.is_recorded = not any(isinstance(work, partial) for work in self._recorded.values())
        self._launched = 0
        self._has_appended = False  # whether the last step left flags after the gradients
        self._exchanged_at: float | None = None

    def launch(
        self, number: int, batches: Batches, flags: LocalFlags = no_flags, elapsed: float | None = None
    ) -> StepResult:
        """Run or queue step `number`, counted from 0. Collective.

        `flags` is called just before the exchange, which sums its flags over the ranks with the gradients.
        `elapsed`: the elapsed fraction of the run's time, if the learning rate follows the clock.
        """
        # Share autotuning results now: the first step has tuned all kernels, and no collective is running.
        if self._launched == 1:
            self.model.kernels.agree(partial(gather_bytes, self.comm))
        self._launched += 1
        self._exchanged_at = self._exchanged_at or time.perf_counter()
        last = self.micro_batches.count - 1
        for micro_batch in range(last + 1):
            sends = False
            if micro_batch == last:
                self.gradient_sync.before_backward(number)
                sends = self.gradient_sync.ready is not None
            self._compute(number, batches, micro_batch, sends)
            self.micro_batches.collect(micro_batch)
        self._append(flags())  # As late as possible, to include signals received during the step.
        self.activity.enter(EXCHANGING)
        self.gradient_sync.sum_gradients(number)
        self._exchanged_at = time.perf_counter()
        # Lock only now. If the exchange never ends, another thread may save the last step's weights.
        with self.weights_lock:
            counted = batches.counted_fraction(number)
            rate = components().learning_rate(self.config, number, elapsed)
            if not math.isfinite(rate):
                name = type(components()).__qualname__
                raise collective_error(
                    UsageError(f"{name}.learning_rate returned {rate} for step {number + 1}")
                )
            return self._update(number, rate, counted)

    def release(self) -> None:
        """Free the memory for activations. No further step may follow."""
        self._recorded.clear()
        del self._pass

    def restart_clock(self) -> None:
        """Exclude the time between two steps from this rank's time in the next one."""
        self._exchanged_at = None

    def gather_updates(self) -> None:
        """Send this rank's updates to all ranks, if ranks share the computation of updates."""
        self.activity.enter(EXCHANGING)
        self.comm.all_gather(self.model.grads.flat, self.optimizer.update_bounds)
        self.activity.enter(UPDATING)

    def _compute(self, number: int, batches: Batches, micro_batch: int, sends: bool) -> None:
        """Add the gradients of this rank's micro-batch to the previous ones.

        `sends`: whether the exchange takes gradients within the backward pass as they become final.
        """
        self.activity.enter(COMPUTING)
        batches.fill(number, self.micro_batches.sequences_of(self.comm.rank, micro_batch), *self._host)
        for device, host in zip(self._inputs, self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        adds = micro_batch > 0 and self.micro_batches.accumulates
        self._recorded[adds, sends]()

    def forward_backward(self, adds: bool, sends: bool) -> None:
        """Compute the loss and gradients of the sequences in `_inputs`."""
        tokens, targets = self._inputs[:2]
        ready = self.gradient_sync.ready if sends else None
        self._pass.loss_and_gradients(tokens, targets, self.micro_batches.weight, adds, ready)

    def _update(self, number: int, lr: float, counted: float) -> StepResult:
        """Update the weights unless the step is rejected.

        The gradients are scaled for a mean over all targets of the batch. `counted` is the fraction of
        targets that count, to rescale to their mean.
        """
        k = self.model.kernels
        grads = self.model.grads
        self.activity.enter(UPDATING)
        scales = self.gradient_sync.scales(counted)
        self.gradient_sync.compute_norm(self.optimizer)
        sums = k.to_host_async(grads.flags)
        squares = k.to_host_async(self.optimizer.norm)
        result = StepResult(lr, scales, sums, squares)
        if self._rejection_reason:
            done = result.wait()
            result.rejected = self._rejection_reason(done.loss, done.norm)
        if not result.rejected:
            self.optimizer.prepare(number, lr, scales.gradients, scales.norm)
            if self.optimizer.update_bounds:
                self.gather_updates()
            # Without a check, the kernel does nothing if the norm is not finite.
            self.optimizer.apply()
        if self.gradient_sync.waits_after_update:
            self.activity.enter(EXCHANGING)
        self.gradient_sync.after_update(number, not result.rejected)
        return result

    def _append(self, flags: Sequence[float]) -> None:
        """Write the flags, and this rank's seconds since the last exchange, after the gradients."""
        k = self.model.kernels
        appended = list(flags)
        if self.comm.size > 1 and not k.capabilities.is_async:  # a queue hides the duration of the work
            assert self._exchanged_at
            seconds = [0.0] * self.comm.size  # other ranks' elements are 0, so the sum has all seconds
            seconds[self.comm.rank] = time.perf_counter() - self._exchanged_at
            appended += seconds
        # Multiple ranks find the last step's sums in the buffer. One rank finds its own flags, mostly zeros.
        if self.comm.size > 1 or any(appended) or self._has_appended:
            k.put(self.model.grads.flags[1 : 1 + len(appended)], np.array(appended, k.accum_dtype))
            self._has_appended = any(appended)


class InFlight:
    """Steps whose results are not read yet, because a GPU computes one while the next is queued."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()
        self.restart_clock()

    def __len__(self) -> int:
        return len(self._results)

    def add_launched(self, result: StepResult) -> None:
        self._results.append(result)

    def wait_for_oldest(self) -> Finished:
        begun = self._finished_at
        done = self._results.popleft().wait()
        self.restart_clock()
        return done._replace(seconds=self._finished_at - begun)

    def restart_clock(self) -> None:
        """Restart the measurement of the next step's time."""
        self._finished_at = time.perf_counter()

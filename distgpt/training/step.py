"""One training step on one rank: forward and backward over its rows, the exchange, the update.

Nothing in it waits for a result, so that a backend with a queue gets the next step while it computes.
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
from distgpt.errors import Say
from distgpt.kernels.api import Array
from distgpt.model.model import FLAG_COUNT, Model
from distgpt.model.optim import AdamW, learning_rate
from distgpt.model.passes import Pass, Ready
from distgpt.training.balance import even_shares
from distgpt.training.gradsync.choose import grad_sync
from distgpt.training.gradsync.outer import LocalSteps, is_local
from distgpt.training.gradsync.schedules import GradSync
from distgpt.training.gradsync.units import Tree
from distgpt.training.place import COMPUTING, EXCHANGING, UPDATING, Place
from distgpt.training.replay import Digest, Replay

Flags = Callable[[], Sequence[float]]


def no_flags() -> Sequence[float]:
    return (0.0,) * (FLAG_COUNT - 1)


@dataclass(slots=True)
class StepResult:
    """A step's learning rate and, once it is done, its mean loss over all ranks and its gradient norm.

    `wrong` is why the weights were left as they were, "" if they were not, None if nobody has judged.
    """

    lr: float
    _loss_scale: float
    _norm_scale: float
    _side: Callable[[], Any]
    _norm: Callable[[], Any]
    wrong: str | None = None

    def read(self) -> tuple[float, float]:
        """Wait for the step and return (loss, gradient norm)."""
        norm = math.sqrt(float(self._norm()[0])) * self._norm_scale
        return float(self._side()[0]) * self._loss_scale, norm

    def flags(self) -> Any:
        """Of a step that was read: the sums over the ranks of the flags that each gave."""
        return self._side()[1:FLAG_COUNT]

    def seconds(self) -> Any:
        """Of a step that was read: how long each rank took from one exchange to the next, if known."""
        return self._side()[FLAG_COUNT:]


class Step:
    """Owns the memory of a step. `config.batch_size` counts sequences over all ranks and micro-batches;
    `config.grad_accum` and `config.recompute` are no longer automatic."""

    def __init__(
        self,
        model: Model,
        optimizer: AdamW,
        comm: Comm,
        config: TrainConfig,
        shares: Sequence[int] | None = None,
    ) -> None:
        """`shares`: sequences of each rank in a micro-batch, if they are not as many on all."""
        self.model, self.optimizer, self.comm, self.config = model, optimizer, comm, config
        k, seq_len = model.kernels, model.config.seq_len
        self._micro_batches = config.grad_accum or 1
        self._shares = shares or even_shares(config, comm.size)
        n_seq = self._shares[comm.rank]
        # Gradients are the mean over this rank's rows, and the mean over ranks is taken later.
        weight = n_seq * comm.size / config.batch_size
        self._weight = 1 / config.units if config.units else weight
        self._host = tuple(np.empty((n_seq, seq_len), np.int32) for _ in range(2))
        self._tokens, self._targets = (k.integers(np.zeros(n_seq * seq_len)) for _ in range(2))
        self._work = Pass(model, n_seq, seq_len, training=True, recompute=config.recompute)
        self._had_flags, self._launched = False, 0
        self._tree = Tree(model.grads, k, self._micro_batches) if config.units > comm.size else None
        self.replay = Replay(comm, k, config)
        self.place = Place()
        self.at_rest = threading.Lock()  # held while weights change: who holds it else may read them
        self._exchanged_at: float | None = None
        self.judge: Callable[[float, float], str] | None = None  # what is wrong with a loss and a norm
        self.noted: Say = lambda text: None  # called with what --grad-sync auto has come to
        self._sync: GradSync | None = None  # made at the first step: memory is counted without other ranks
        self._ready: Ready | None = None  # called by the backward pass under way
        # By whether they add to gradients, and whether these leave while the pass goes on.
        self._passes = {
            how: k.record(partial(self._gradients, how[0])) for how in product((False, True), repeat=2)
        }

    def launch(self, step: int, batches: Batches, flags: Flags = no_flags) -> StepResult:
        """Do step number `step`, counted from 0, or put it into the backend's queue. Collective.

        `flags` gives numbers of this rank, just before the gradients are summed; so are they, over all ranks.
        """
        k = self.model.kernels
        if self._launched == 1:  # by now everything has run, and no exchange is under way
            k.agree(partial(gather_bytes, self.comm))
        self._launched += 1
        self._sync = sync = self._sync or grad_sync(self.comm, self.optimizer, self.config, self.noted)
        self._exchanged_at = self._exchanged_at or time.perf_counter()
        pair = self.replay.pair(step)
        again = self._replayed(step, batches, pair) if pair else None
        for micro_batch in range(self._micro_batches):
            if micro_batch == self._micro_batches - 1:
                sync.begin(step)
                self._ready = None if pair else sync.ready
            self._compute(step, batches, micro_batch, self.comm.rank)
            self._ready = None
            if pair and not micro_batch:
                own = self._digest() if self.comm.rank == pair[0] else None
                self.place.enter(EXCHANGING)
                self.replay.compare(step, pair, own, again)
            if self._tree:
                self._tree.add(micro_batch)
        grads = self.model.grads
        if any(numbers := [*flags(), *self._seconds_of_ranks()]) or self._had_flags:
            k.put(grads.flags[1 : 1 + len(numbers)], np.array(numbers, k.wide))
            self._had_flags = any(numbers)
        self.place.enter(EXCHANGING)
        sync.finish(step)
        self._exchanged_at = time.perf_counter()
        with self.at_rest:
            return self._finish(step, sync)

    def end_round(self, step: int) -> None:
        """The same weights on all ranks, where a run resumed within a round and has no step left to do."""
        outer = self.optimizer.outer
        if outer and not outer.in_sync:
            sync = grad_sync(self.comm, self.optimizer, self.config, self.noted)
            assert isinstance(sync, LocalSteps)
            sync.end_round(step - 1)

    @property
    def summed_by(self) -> str:
        """How gradients are summed: what --grad-sync auto has come to, if it has."""
        return self._sync.name if self._sync else self.config.grad_sync

    @property
    def is_settled(self) -> bool:
        """Whether --grad-sync auto has come to something, if that was asked for."""
        return self._sync is not None and getattr(self._sync, "is_settled", True)

    def exchanges(self) -> list[tuple[object, str, Array]]:
        """After the first step: the methods that wait for other ranks, and what they make alike."""
        model = self.model
        if is_local(self.config, self.comm.size):
            return [
                (self._sync, "sum_numbers", model.grads.flags),
                (self._sync, "sum_changes", model.grads.flat),
            ]
        shared = [(self._sync, "share", model.params.flat)] if self.optimizer.is_part else []
        return [(self._sync, "finish", model.grads.with_flags), *shared]

    def _compute(self, step: int, batches: Batches, micro_batch: int, rank: int) -> None:
        """Add the gradients of a rank's micro-batch to those before it."""
        self.place.enter(COMPUTING)
        c = self.config
        if c.units:
            rows = rank_rows(c.batch_size, rank * self._micro_batches + micro_batch, c.units, 0, 1)
        else:
            rows = shared_rows(self._shares, rank, micro_batch)
        batches.fill(step, rows, *self._host)
        for device, host in zip((self._tokens, self._targets), self._host, strict=True):
            self.model.kernels.put(device, host.reshape(-1))
        self._passes[bool(micro_batch and not c.units), self._ready is not None]()

    def _replayed(self, step: int, batches: Batches, pair: tuple[int, int]) -> Digest | None:
        """What this rank finds for the first micro-batch of another one, if it is its turn."""
        if self.comm.rank != pair[1]:
            return None
        self._compute(step, batches, 0, pair[0])
        return self._digest()

    def _digest(self) -> Digest:
        grads = self.model.grads
        return self.replay.digest(grads.flat, grads.flags)

    def _seconds_of_ranks(self) -> list[float]:
        """Since the last exchange, for this rank, and 0 for the others; nothing where a queue hides it."""
        if self.comm.size == 1 or self.model.kernels.capabilities.is_async:
            return []
        assert self._exchanged_at
        found = [0.0] * self.comm.size
        found[self.comm.rank] = time.perf_counter() - self._exchanged_at
        return found

    def _finish(self, step: int, sync: GradSync) -> StepResult:
        """Update the weights, unless the summed gradients are bad."""
        c, k, grads = self.config, self.model.kernels, self.model.grads
        self.place.enter(UPDATING)
        # Applied by the optimizer in its only pass over the gradients; units are weighted from the start.
        mean = 1.0 if c.units else 1.0 / self.comm.size
        local = is_local(c, self.comm.size)  # then norm² is the mean of those of the ranks
        grad_scale, norm_scale = (1.0, math.sqrt(mean)) if local else (mean, mean)
        sync.measure(self.optimizer)
        lr, side, norm = learning_rate(c, step), k.later(grads.flags), k.later(self.optimizer.norm)
        result = StepResult(lr, mean, norm_scale, cache(side), cache(norm))
        if self.judge:
            result.wrong = self.judge(*result.read())
        if not result.wrong:
            self.optimizer.update(step, grad_scale, norm_scale)
        if self.optimizer.is_part or local:
            self.place.enter(EXCHANGING)
        sync.share(step, not result.wrong)
        return result

    def _gradients(self, accumulate: bool) -> None:
        self._work.loss_and_gradients(
            self._tokens,
            self._targets,
            self._weight,
            accumulate,
            self._ready,
        )

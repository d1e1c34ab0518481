"""Sum gradients in buckets during the backward pass, in a thread or through NCCL.

Parameters are in the order in which their gradients are finished, so a bucket is a range of the flat buffer:
`ready(n)` means that the first n gradients are final. All ranks use the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from distgpt.core.comm.api import Comm, QueuedComm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Work
from distgpt.core.train.parallel_strategy import Allreduce, GradientSync, Reduction, SyncAfterBackward
from distgpt.parallel.node_memory import one_by_one
from distgpt.parallel.reductions import HostWire, ReduceScatterGather, hierarchical, in_parts, votes_sum

BUCKET = 1 << 17  # minimum elements of a bucket; latency dominates smaller ones
CACHED_BYTES = 4 << 20  # bytes that MPI sums at a time within a node, so that they stay in cache
LARGE_BUCKET = 1 << 22  # minimum elements with NCCL, which needs 16 MB for nearly the full bandwidth


class Overlapped(SyncAfterBackward):
    """Buckets are sent as soon as they are final. A thread sums them through a separate communicator.

    `between` is `Kernels.between`: a pass that is recorded calls `ready` before it has computed, and does
    not call it in replays.
    """

    least = BUCKET

    def __init__(
        self,
        size: int,
        reduction: Reduction,
        between: Callable[[Work], None],
        sum_flags: Callable[[], None],
        mean: float,
    ) -> None:
        super().__init__("overlapped", reduction, size, sum_flags, mean)
        self._between = between
        self._thread = ThreadPoolExecutor(1, "summing")
        self._cut = self._sent = 0  # elements before the last cut, and elements sent
        self._sums: list[Future[None]] = []  # of this step's buckets
        self._step = 0
        self.ready = self._ready

    def before_backward(self, step: int) -> None:
        self._cut = self._sent = 0
        self._step = step

    def _ready(self, final: int) -> None:
        if final <= self._cut:  # the pass is recorded again
            self._cut = 0
        if final - self._cut >= self.least and final < self._size:
            self._cut = final
            self._between(partial(self._send, final))

    def _send(self, final: int) -> None:
        self._start(self._sent, final)
        self._sent = final

    def sum_gradients(self, step: int) -> None:
        self._send(self._size)
        self._finish()
        self._sum_votes()

    def _start(self, start: int, stop: int) -> None:
        self._sums.append(self._thread.submit(self._sum, start, stop))

    def _sum(self, start: int, stop: int) -> None:
        """Sum a bucket, unless one before it failed: other ranks may not take part any more."""
        if not any(each.done() and each.exception() for each in self._sums):
            self._reduction.sum(start, stop, self._step)

    def _finish(self) -> None:
        for each in self._sums:
            each.result()
        self._sums.clear()  # kept after a failure, so that no later bucket is summed


class OverlappedNccl(Overlapped):
    """NCCL sums the buckets on a separate stream. Recorded passes are split at each call."""

    least = LARGE_BUCKET

    def __init__(self, queued: QueuedComm, *args: Any) -> None:
        super().__init__(*args)
        self._queued = queued

    def _start(self, start: int, stop: int) -> None:
        self._queued.on_side_stream(partial(self._reduction.sum, start, stop, self._step))

    def _finish(self) -> None:
        self._queued.join()


def make(comm: Comm, model: Model, t: TrainConfig) -> GradientSync:
    """Return the exchange of --grad-sync overlapped. Collective."""
    mean, wire = 1.0 / comm.size, t.gradient_dtype
    sum_flags, size, flat = votes_sum(comm, model, t), model.layout.size, model.grads.flat
    reduction: Reduction

    def between(act: Work) -> None:
        model.kernels.between(act)  # looked up at each call, since a recording may replace it

    if model.kernels.capabilities.is_async:
        assert comm.queued
        reduction = Allreduce(comm, flat) if wire == "float32" else in_parts(model, t, comm, wire)
        return OverlappedNccl(comm.queued, size, reduction, between, sum_flags, mean)
    own = comm.dup_sleeping()

    def parts(comm: Comm, wire: str) -> ReduceScatterGather:
        """Return a reduction for the thread, which must not use the workers."""
        return ReduceScatterGather(comm, flat, wire, t.seed, HostWire(one_by_one, 1))

    if by_node := hierarchical(own, flat, wire, parts):
        reduction = by_node
    elif wire != "float32":
        reduction = parts(own, wire)
    else:
        # Within a node, summing pieces that fit in a cache is faster than one large sum.
        in_cache = CACHED_BYTES // flat.itemsize if own.size == own.local_size else 0
        reduction = Allreduce(own, flat, in_cache)
    return Overlapped(size, reduction, between, sum_flags, mean)

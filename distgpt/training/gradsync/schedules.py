"""When gradients are summed over the ranks, and who updates which weights with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from distgpt.comm.api import Comm, Direct
from distgpt.config import TrainConfig
from distgpt.kernels.api import PIECE, Work
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Ready
from distgpt.training.gradsync.ways import Way, bounds_of

BUCKET = 1 << 17  # elements that leave together, at least: fewer would pay for their latency alone
LARGE_BUCKET = 1 << 22  # the same by NCCL, which needs 16 MB to come near the speed of the links


class GradSync(Protocol):
    """What a step does about other ranks. All calls but those of `ready` are collective."""

    @property
    def name(self) -> str:
        """What --grad-sync calls it."""

    @property
    def ready(self) -> Ready | None:
        """Called in the last backward pass of a step with how many gradients are final."""

    def begin(self, step: int) -> None:
        """Before that pass."""

    def finish(self, step: int) -> None:
        """The gradients that this rank updates with, and what lies behind them, ← their sums over ranks."""

    def measure(self, optimizer: AdamW) -> None:
        """optimizer.norm ← Σ g² of all summed gradients."""

    def share(self, step: int, is_changed: bool) -> None:
        """After an update, or without: the weights that other ranks changed, where this one needs them."""


class AtTheEnd:
    """In one go behind the backward pass; every rank then updates everything."""

    ready: Ready | None = None

    def __init__(self, name: str, way: Way, size: int, sum_rest: Callable[[], None]) -> None:
        """`way` sums the first `size` elements of the flat buffer, `sum_rest` what lies behind them."""
        self.name, self._size, self._sum_rest = name, size, sum_rest
        self._way: Way | None = way

    def begin(self, step: int) -> None:
        return None

    def finish(self, step: int) -> None:
        assert self._way
        self._way.sum(0, self._size, step)
        self._sum_rest()

    def measure(self, optimizer: AdamW) -> None:
        optimizer.compute_norm()

    def share(self, step: int, is_changed: bool) -> None:
        return None

    def free(self) -> None:
        """Give back threads, communicators and memory: it is not used again. Collective."""
        assert self._way
        self._way.free()
        self._way = None


class Overlapped(AtTheEnd):
    """In buckets, by a thread, while the backward pass goes on. All ranks cut them alike."""

    def __init__(self, size: int, way: Way, sum_rest: Callable[[], None]) -> None:
        """`size`: of the flat buffer; `way`: with a communicator for the thread."""
        super().__init__("overlapped", way, size, sum_rest)
        self._thread: threading.Thread | None = None
        self._handed = 0
        self._buckets: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._step = 0
        self._is_over = False
        self.ready = self._ready

    def begin(self, step: int) -> None:
        if self._thread is None:
            assert self._way
            self._thread = threading.Thread(
                target=self._serve, args=(self._way,), name="summing", daemon=True
            )
            self._thread.start()
        self._step = step

    def _ready(self, final: int) -> None:
        if final - self._handed >= BUCKET:
            self._hand(final)

    def _hand(self, final: int) -> None:
        self._buckets.put((self._handed, final))
        self._handed = final

    def finish(self, step: int) -> None:
        if self._handed < self._size:
            self._hand(self._size)
        self._handed = 0
        self._buckets.put(None)
        failure = self._ended.get()
        if failure is not None:
            raise failure
        self._sum_rest()

    def _serve(self, way: Way) -> None:
        failure: BaseException | None = None
        while True:
            bucket = self._buckets.get()
            if bucket is None and self._is_over:
                return
            if bucket is None:
                self._ended.put(failure)
            elif failure is None:
                try:
                    way.sum(*bucket, self._step)
                except BaseException as error:  # raised in the main thread
                    failure = error

    def free(self) -> None:
        self._is_over = True
        self._buckets.put(None)
        if self._thread:
            self._thread.join()
        super().free()


class Beside(AtTheEnd):
    """In buckets, by NCCL on a second stream, while the backward pass goes on. All ranks cut them alike.

    The pass is recorded in parts, one for each bucket, and NCCL is called between them.
    """

    def __init__(
        self,
        size: int,
        direct: Direct,
        way: Way,
        between: Callable[[Work], None],
        sum_rest: Callable[[], None],
    ) -> None:
        """`size`: of the flat buffer; `between`: of the kernels."""
        super().__init__("overlapped", way, size, sum_rest)
        self._direct, self._between = direct, between
        self._cut = self._sent = 0  # elements before the last cut, and those that have left
        self._step = 0
        self.ready = self._ready

    def begin(self, step: int) -> None:
        self._cut = self._sent = 0
        self._step = step

    def _ready(self, final: int) -> None:
        """Not called when the pass is repeated, as `_send` is."""
        if final - self._cut >= LARGE_BUCKET and final < self._size:
            self._cut = final
            self._between(partial(self._send, final))

    def _send(self, final: int) -> None:
        assert self._way
        self._direct.beside(partial(self._way.sum, self._sent, final, self._step))
        self._sent = final

    def finish(self, step: int) -> None:
        self._send(self._size)
        self._direct.join()
        self._sum_rest()


@dataclass
class Sharded:
    """Each rank sums, clips and updates a part, and has the moments of that part alone (ZeRO, stage 1).

    What ranks then give each other is what the passes read. Where that is rounded, the weights in full
    precision stay with their owner, as the moments do.
    """

    comm: Comm
    model: Model
    reduce: Callable[[Sequence[int], int], None]  # this rank's part of the gradients, between two bounds
    sum_extra: Callable[[], None]
    ready: Ready | None = None
    name = "sharded"

    def __post_init__(self) -> None:
        self._pieces = self.model.kernels.scalars(-(-self.model.layout.size // PIECE))

    def begin(self, step: int) -> None:
        return None

    @property
    def _bounds(self) -> list[int]:
        return shards(self.model.layout.size, self.comm.size)

    def finish(self, step: int) -> None:
        self.reduce(self._bounds, step)
        self.sum_extra()

    def measure(self, optimizer: AdamW) -> None:
        """From the same pieces as on a rank that has them all, so that it is the same number."""
        k, own = self.model.kernels, optimizer.own
        k.zero(self._pieces)
        here = self._pieces[own.start // PIECE : -(-own.stop // PIECE)]
        k.squares(here, self.model.grads.flat[own])
        self.comm.sum(self._pieces)
        k.add_up(optimizer.norm, self._pieces)

    def share(self, step: int, is_changed: bool) -> None:
        if is_changed:
            self.comm.all_gather(self.model.params.flat, self._bounds)


def shards(size: int, ranks: int) -> list[int]:
    """Where each rank's part of the flat buffers begins, and where the last one ends.

    At multiples of the pieces whose squares make the norm, which is then the same number for any parts.
    """
    return bounds_of(0, size, ranks, PIECE)


def has_shards(t: TrainConfig, ranks: int) -> bool:
    """Whether each rank has a part of the moments alone."""
    return t.grad_sync == "sharded" and ranks > 1


def own_shard(t: TrainConfig, size: int, comm: Any) -> slice | None:
    """What this rank updates; None if that is everything."""
    if not has_shards(t, comm.size):
        return None
    bounds = shards(size, comm.size)
    return slice(bounds[comm.rank], bounds[comm.rank + 1])

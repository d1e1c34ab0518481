"""The protocol of a communicator. All ranks make the same calls in one order, but for `abort` and `send`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # commands import this file, and are to begin without NumPy
    import numpy as np

Array: TypeAlias = "np.ndarray"  # contiguous


class Comm(Protocol):
    """The ranks of one job. `local_rank` of `local_size` counts the ranks on this node.

    `cores` is this rank's fair share of the cores it may run on: one that two ranks may use counts half.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cores: float
    queued: QueuedComm | None  # None where the host sums
    is_threadsafe: bool  # whether several threads may call it at once, those of `dup_sleeping` among them

    def sum(self, array: Array) -> None:
        """array ← Σ over ranks of array, in place, in one Allreduce."""

    def allreduce_max(self, value: int) -> int:
        """Return the maximum of an integer over the ranks."""

    def broadcast(self, array: Array) -> None:
        """array ← rank 0's array, in place."""

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes, on every rank; the others pass None."""

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        """received[r, : counts[me]] ← what rank r has at sent[starts[me]] on, for every rank r.

        `me` is this rank. `counts` are the same on all ranks, `starts` need not be.
        """

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        """array[bounds[r] : bounds[r + 1]] ← what rank r has there, in place, for every rank r."""

    def send(self, array: Array, source: int, target: int) -> None:
        """On rank `target` array ← that of rank `source`; the others need not be there."""

    def dup_sleeping(self) -> Comm:
        """Return the same ranks for another thread, whose waiting calls sleep instead of spinning."""

    def split_by_node(self) -> tuple[Comm, Comm] | None:
        """Return this node's ranks, and the ranks with this local rank on all nodes.

        None if splitting is pointless: one node, one rank on each node, or nodes of unequal size.
        """

    def barrier(self, resting: bool = False) -> None:
        """Return once every rank has called this. Resting ranks leave their cores to others meanwhile."""

    def abort(self, exit_code: int) -> None:
        """End the whole job now, from any one rank. Not collective; does not return."""


class QueuedComm(Protocol):
    """Sums of arrays on devices that queue them behind their other work: nothing waits. Collective."""

    def reduce(self, array: Array, bounds: Sequence[int]) -> None:
        """Reduce-scatter: array[bounds[rank] : bounds[rank + 1]] ← Σ over ranks of that part.

        The rest of `array` is undefined afterwards. All parts have equal length; the last may be longer.
        """

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Run work() on a stream of its own: after all work queued so far, beside all work until `join`."""

    def join(self) -> None:
        """Let all work queued from here on wait for the other stream."""

    def trouble(self) -> str:
        """Return what has failed, "" if nothing has. Any thread may call it; not collective."""

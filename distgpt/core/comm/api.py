"""The protocol of a communicator, and the one of a single rank.

All ranks make the same calls in one order, but for `abort` and `send`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from distgpt.core.comm.resources import usable_cores

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


class SerialComm:
    """One rank: code that communicates needs no case of its own. Sums and broadcasts change nothing."""

    rank = 0
    size = 1
    queued: QueuedComm | None = None
    is_threadsafe = True

    def __init__(self, beside: Comm | None = None) -> None:
        """`beside`: ranks with which this process shares a machine, but no work."""
        self.local_rank = beside.local_rank if beside else 0
        self.local_size = beside.local_size if beside else 1
        self.cores = beside.cores if beside else float(len(usable_cores()))

    def sum(self, array: Array) -> None:
        return None

    def allreduce_max(self, value: int) -> int:
        return value

    def broadcast(self, array: Array) -> None:
        return None

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        received[0, : counts[0]] = sent[starts[0] : starts[0] + counts[0]]

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        return None

    def send(self, array: Array, source: int, target: int) -> None:
        return None

    def dup_sleeping(self) -> SerialComm:
        return self

    def split_by_node(self) -> None:
        return None

    def barrier(self, resting: bool = False) -> None:
        return None

    def abort(self, exit_code: int) -> None:
        os._exit(exit_code)

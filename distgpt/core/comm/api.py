"""The communicator protocol, and the communicator of a single rank.

All ranks make the same calls in the same order, except for `abort` and `send`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from distgpt.core.comm.resources import usable_cores

if TYPE_CHECKING:  # Commands import this module and must start without NumPy.
    import numpy as np

Array: TypeAlias = "np.ndarray"  # contiguous


class Comm(Protocol):
    """The ranks of one job. `local_rank` and `local_size` count the ranks on this node.

    `cores` is this rank's fair share of its allowed cores: a core that two ranks may use counts 0.5.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cores: float
    queued: QueuedComm | None  # None if the host sums
    is_threadsafe: bool  # whether threads may call it concurrently, also through `dup_sleeping`

    def sum(self, array: Array) -> None:
        """array ← Σ over ranks of array, in place, in one Allreduce."""

    def allreduce_max(self, value: int) -> int: ...

    def broadcast(self, array: Array) -> None:
        """array ← rank 0's array, in place."""

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the other ranks pass None."""

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        """received[r, : counts[me]] ← rank r's sent[starts[me] :], for every rank r.

        `me` is this rank. `counts` must be the same on all ranks, `starts` may differ.
        """

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        """array[bounds[r] : bounds[r + 1]] ← rank r's values there, in place, for every rank r."""

    def send(self, array: Array, source: int, target: int) -> None:
        """On rank `target`, array ← rank `source`'s array. Only these two ranks need to call it."""

    def dup_sleeping(self) -> Comm:
        """Return the same ranks for another thread, whose waiting calls sleep instead of spinning."""

    def split_by_node(self) -> tuple[Comm, Comm] | None:
        """Return this node's ranks, and the ranks with this local rank on all nodes.

        None if splitting is pointless (one node, one rank per node, or nodes of unequal size).
        """

    def barrier(self, resting: bool = False) -> None:
        """Wait for every rank to call this. With `resting`, waiting ranks leave their cores to others."""

    def abort(self, exit_code: int) -> None:
        """End the whole job immediately, from any rank. Not collective; does not return."""


class QueuedComm(Protocol):
    """Asynchronous sums of device arrays, queued after the device's other work. Collective."""

    def reduce(self, array: Array, bounds: Sequence[int]) -> None:
        """Reduce-scatter: array[bounds[rank] : bounds[rank + 1]] ← Σ over ranks of that part.

        The rest of `array` is undefined afterwards. All parts have equal length, except that the last may be
        longer.
        """

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Run work() on a side stream, after work queued before and concurrent with work until `join`."""

    def join(self) -> None:
        """Make later work wait for the side stream."""

    def trouble(self) -> str:
        """Return a description of a failure, or "". Thread-safe; not collective."""


class SerialComm:
    """A single rank, so that callers need no special case. Sums and broadcasts change nothing."""

    rank = 0
    size = 1
    queued: QueuedComm | None = None
    is_threadsafe = True

    def __init__(self, beside: Comm | None = None) -> None:
        """`beside`: ranks that share a machine with this process, but no work."""
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

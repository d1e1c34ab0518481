"""A real communicator of size one: code that communicates needs no case of its own for one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

from distgpt.core.comm.api import Array, Comm, QueuedComm
from distgpt.core.comm.resources import usable_cores


class SerialComm:
    """Sums and broadcasts over one rank leave an array as it is."""

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

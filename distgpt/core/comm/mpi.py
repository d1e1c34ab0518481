"""The ranks of an MPI job. MPI starts with the first communicator, not on import."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = False  # if MPI does not match the launcher, starting it may exit
mpi4py.rc.finalize = True
from mpi4py import MPI

from distgpt.core.base.interrupts import default_signals
from distgpt.core.comm.api import Array, QueuedComm
from distgpt.core.comm.resources import usable_cores

LARGEST_MESSAGE = 1 << 30  # bytes: MPI counts in 32-bit integers
PAUSE = 1e-4  # seconds between two polls of a sleeping communicator
LONGEST_PAUSE = 2e-2  # seconds: the maximum for long waits
SECONDS_TO_SPEAK = 0.3  # seconds: launchers drop the last output of a rank that aborts the job


class MpiComm:
    """MPI ranks, by default all of mpi4py's world. Uses buffers only, no pickling."""

    queued: QueuedComm | None = None

    def __init__(self, ranks: Any = None, sleeping: bool = False) -> None:
        if not MPI.Is_initialized():
            with default_signals():  # it waits for all ranks, and one may never start
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._world = MPI.COMM_WORLD if ranks is None else ranks
        self._sleeping = sleeping
        self.is_threadsafe = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        node = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.size = self._world.rank, self._world.size
        self.local_rank, self.local_size = node.rank, node.size
        self.cores = _share_of_cores(node)
        node.Free()

    def sum(self, array: Array) -> None:
        for piece in _pieces(array):
            if self._sleeping:
                self._wait([self._world.Iallreduce(MPI.IN_PLACE, piece)])
            else:
                self._world.Allreduce(MPI.IN_PLACE, piece)

    def all_to_all(self, received: Array, sent: Array, starts: Sequence[int], counts: Sequence[int]) -> None:
        own, rank = counts[self.rank], self.rank
        received[rank, :own] = sent[starts[rank] : starts[rank] + own]
        self._swap(
            lambda other: sent[starts[other] : starts[other] + counts[other]],
            lambda other: received[other, :own],
        )

    def all_gather(self, array: Array, bounds: Sequence[int]) -> None:
        own = array[bounds[self.rank] : bounds[self.rank + 1]]
        self._swap(lambda other: own, lambda other: array[bounds[other] : bounds[other + 1]])

    def _swap(self, going: Callable[[int], Array], coming: Callable[[int], Array]) -> None:
        """Exchange arrays with every other rank concurrently.

        MPI's own Alltoallv and Allgatherv take up to three times as long over a network.
        """
        world, requests = self._world, []
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        for begin, arrays in ((world.Irecv, coming), (world.Isend, going)):
            for other in others:
                requests += [begin(piece, other) for piece in _pieces(arrays(other))]
        self._wait(requests)

    def send(self, array: Array, source: int, target: int) -> None:
        if source != target and self.rank in (source, target):
            call, other = (self._world.Isend, target) if self.rank == source else (self._world.Irecv, source)
            self._wait([call(piece, other) for piece in _pieces(array)])

    def dup_sleeping(self) -> MpiComm:
        return MpiComm(self._world.Dup(), sleeping=True)

    def split_by_node(self) -> tuple[MpiComm, MpiComm] | None:
        return self._levels

    @cached_property  # cached, because communicators are limited
    def _levels(self) -> tuple[MpiComm, MpiComm] | None:
        same = self.allreduce_max(self.local_size) == -self.allreduce_max(-self.local_size)
        if not same or self.local_size in (1, self.size):
            return None
        node = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        across = self._world.Split(self.local_rank, self.rank)
        return MpiComm(node, self._sleeping), MpiComm(across, self._sleeping)

    def _wait(self, requests: list[Any]) -> None:
        """Wait until all requests are done; a sleeping communicator polls, where MPI would spin."""
        if not self._sleeping:
            MPI.Request.Waitall(requests)
            return
        while not MPI.Request.Testall(requests):
            time.sleep(PAUSE)

    def allreduce_max(self, value: int) -> int:
        buffer = np.array([value], np.int64)
        self._world.Allreduce(MPI.IN_PLACE, buffer, MPI.MAX)
        return int(buffer[0])

    def broadcast(self, array: Array) -> None:
        for piece in _pieces(array):
            self._world.Bcast(piece)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        length = np.array([0 if data is None else len(data)], np.int64)
        self._world.Bcast(length)
        buffer = np.empty(length[0], np.uint8)
        if data is not None:
            buffer[...] = np.frombuffer(data, np.uint8)
        self.broadcast(buffer)
        return buffer.tobytes()

    def barrier(self, resting: bool = False) -> None:
        if not resting:
            self._world.Barrier()
            return
        arrived, pause = self._world.Ibarrier(), PAUSE
        while not arrived.Test():
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)

    def abort(self, exit_code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(SECONDS_TO_SPEAK)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPICH would add a line; the reason was printed
        self._world.Abort(exit_code)
        os._exit(exit_code)


def vendor() -> str:
    """Return the MPI implementation, such as "MPICH". Also works before MPI starts."""
    return str(MPI.get_vendor()[0])


def library() -> str:
    """Return the MPI library and its version, such as "MPICH 4.3.0" or "Open MPI v5.0.6"."""
    first = configuration().split("\n")[0].strip("\x00 ")
    return " ".join(first.partition(",")[0].replace("Version:", "").split())  # the rest is packager and dates


def configuration() -> str:
    """Return the MPI library's full version and build description."""
    return str(MPI.Get_library_version())


def _share_of_cores(node: Any) -> float:
    """Return this rank's share of cores, whether launchers bind ranks to cores or not."""
    mine = sorted(usable_cores())
    highest = np.array([mine[-1]])
    node.Allreduce(MPI.IN_PLACE, highest, MPI.MAX)
    users = np.zeros(highest[0] + 1, np.int64)
    users[mine] = 1
    node.Allreduce(MPI.IN_PLACE, users)
    return float((1 / users[mine]).sum())


def _pieces(array: Array) -> list[Array]:
    flat = array.reshape(-1)
    step = LARGEST_MESSAGE // flat.itemsize
    return [flat[i : i + step] for i in range(0, flat.size, step)]

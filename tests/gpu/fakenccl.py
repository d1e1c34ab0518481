"""An emulation of CuPy's NCCL module.

Without a job it computes nothing. In a `Job`, ranks are threads with their own FakeCupy. A call completes when its
stream reaches it and all ranks have made it; a different call on another rank fails on all ranks. In a `ProcessJob`,
ranks are processes that use MPI for each call; like NCCL, it rejects two ranks on one GPU of a host.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from fakecupy import PATIENCE, WORLD, FakeCupy, Stream

VERSION = 22809  # does not let ranks share a GPU
KINDS = {1: np.uint8, 7: np.float32, 8: np.float64, 9: np.uint16}


class NcclError(RuntimeError): ...


class Call(NamedTuple):
    """`about` is equal on all ranks. In `send` and `recv` it starts with the other rank."""

    name: str
    about: tuple[int, ...]
    source: int = 0
    target: int = 0


class FakeNccl:
    """CuPy's NCCL module on one rank."""

    available = True
    NCCL_SUM, NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 0, 1, 7, 8, 9
    NcclError = NcclError

    def __init__(self, job: Job | ProcessJob | None = None, xp: FakeCupy | None = None, version: int = VERSION) -> None:
        self.identity, self.job, self.xp, self.version = bytes(range(256))[64:192], job, xp, version
        self.trouble: Exception | None = None  # raised by check_async_error
        self.NcclCommunicator = partial(NcclCommunicator, self)
        self.communicator: NcclCommunicator | None = None
        self._together: list[tuple[Call, int]] | None = None

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return self.identity

    def groupStart(self) -> None:
        assert self._together is None, "a group within a group"
        self._together = []

    def groupEnd(self) -> None:
        assert self._together is not None
        calls, self._together = self._together, None
        if calls:
            self._begin(calls)

    def called(self, call: Call, stream: int) -> None:
        if self._together is None:
            self._begin([(call, stream)])
        else:
            self._together.append((call, stream))

    def _begin(self, calls: list[tuple[Call, int]]) -> None:
        if self.job is None:
            return
        assert self.communicator and self.xp
        (ptr,) = {stream for _, stream in calls}
        stream = next(stream for stream in self.xp.streams if stream.ptr == ptr)
        assert stream.captured is None, "NCCL's calls are not captured"
        self.job.begin(self.communicator.rank, self.xp, stream, [call for call, _ in calls])


class NcclCommunicator:
    def __init__(self, nccl: FakeNccl, ndev: int, commId: Any, rank: int) -> None:
        if type(commId) is not bytes:
            raise TypeError("Argument 'commId' has incorrect type (expected bytes)")
        assert commId == nccl.identity
        self._nccl, self.rank = nccl, rank
        nccl.communicator = self
        if isinstance(nccl.job, ProcessJob):
            nccl.job.meet(nccl)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._nccl.called(Call("allReduce", (count, datatype, op), sendbuf, recvbuf), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._nccl.called(Call("broadcast", (count, datatype, root), sendbuff, recvbuff), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._nccl.called(Call("reduce", (count, datatype, op, root), sendbuf, recvbuf), stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._nccl.called(Call("reduceScatter", (recvcount, datatype, op), sendbuf, recvbuf), stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._nccl.called(Call("allGather", (count, datatype), sendbuf, recvbuf), stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._nccl.called(Call("send", (peer, count, datatype), source=sendbuf), stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._nccl.called(Call("recv", (peer, count, datatype), target=recvbuf), stream)

    def check_async_error(self) -> None:
        if self._nccl.trouble:
            raise self._nccl.trouble


class Job:
    """The ranks of a communicator. The n-th calls of all ranks match."""

    def __init__(self, size: int) -> None:
        self.size, self.trouble = size, ""
        self._begun = [0] * size
        self._meetings: list[Meeting] = []

    def begin(self, rank: int, xp: FakeCupy, stream: Stream, calls: list[Call]) -> None:
        with WORLD:
            number = self._begun[rank]
            self._begun[rank] += 1
            if number == len(self._meetings):
                self._meetings.append(Meeting(self))
            meeting = self._meetings[number]
            meeting.ranks[rank] = (xp, stream, stream.begun, calls)
            try:
                meeting.compare()
            except NcclError as error:
                self.trouble = f"call {number}: {error}"
            WORLD.notify_all()
            self.require_well()
            position = stream.begun
        stream.enqueue(partial(meeting.finish, rank, position))

    def fail(self, text: str) -> None:
        """Fail all ranks, including waiting ones."""
        with WORLD:
            self.trouble = self.trouble or text
            WORLD.notify_all()

    def require_well(self) -> None:
        if self.trouble:
            raise NcclError(self.trouble)


class Meeting:
    """One call, or one group of calls, on all ranks."""

    def __init__(self, job: Job) -> None:
        self._job, self._done = job, False
        self.ranks: dict[int, tuple[FakeCupy, Stream, int, list[Call]]] = {}

    def compare(self) -> None:
        """Raise unless all present ranks made equal calls."""
        collectives = {
            rank: [(call.name, call.about) for call in self._of(rank) if call.name not in ("send", "recv")]
            for rank in self.ranks
        }
        (first, wanted), *others = collectives.items()
        for rank, found in others:
            if found != wanted:
                raise NcclError(f"rank {first} has called {wanted}, rank {rank} {found}")
        for rank in self.ranks:
            for other in self.ranks:
                sent, taken = self._between("send", rank, other), self._between("recv", other, rank)
                if [call.about[1:] for call in sent] != [call.about[1:] for call in taken]:
                    raise NcclError(f"rank {rank} sends to {other} what that does not receive")

    def finish(self, rank: int, position: int) -> None:
        """Run in this rank's stream; the first rank computes for all."""
        while len(self.ranks) < self._job.size and not self._done:
            self._job.require_well()
            if not WORLD.wait(PATIENCE):
                self._job.trouble = f"rank {rank} waits in vain: only {sorted(self.ranks)} have come"
        self._job.require_well()
        if self._done:
            return
        for other, (_, stream, before, _) in sorted(self.ranks.items()):
            if other != rank:
                stream.run(before)
        if not self._done:
            self._done = True
            self.compute()

    def compute(self) -> None:
        for number, call in enumerate(self._of(0)):
            if call.name not in ("send", "recv"):
                self._collective([self._of(each)[number] for each in range(self._job.size)])
        self._exchange()

    def _of(self, rank: int) -> list[Call]:
        return self.ranks[rank][3]

    def _between(self, name: str, own: int, other: int) -> list[Call]:
        return [call for call in self._of(own) if call.name == name and call.about[0] == other]

    def _collective(self, calls: list[Call]) -> None:
        name, (count, datatype, *_) = calls[0].name, calls[0].about
        size, ranks = self._job.size, range(self._job.size)
        every = count * size
        sent = every if name == "reduceScatter" else count
        sources = [self._memory(rank, calls[rank].source, sent, datatype).copy() for rank in ranks]
        if name in ("allReduce", "reduce", "reduceScatter"):
            total = sources[0]
            for source in sources[1:]:
                total += source
        for rank in ranks:
            target = calls[rank].target
            if name == "reduceScatter":
                self._in_place(calls[rank].source + rank * count * total.itemsize, target)
                self._memory(rank, target, count, datatype)[:] = total[rank * count : (rank + 1) * count]
            elif name == "allGather":
                self._in_place(target + rank * count * sources[0].itemsize, calls[rank].source)
                self._memory(rank, target, every, datatype)[:] = np.concatenate(sources)
            elif name == "broadcast":
                self._memory(rank, target, count, datatype)[:] = sources[calls[0].about[-1]]
            elif name == "allReduce" or rank == calls[0].about[-1]:
                self._memory(rank, target, count, datatype)[:] = total

    @staticmethod
    def _in_place(wanted: int, given: int) -> None:
        if wanted != given:
            raise NcclError("a collective in place needs this rank's part where it belongs")

    def _exchange(self) -> None:
        ranks = range(self._job.size)
        moves = [
            (self._memory(to, taken.target, *taken.about[1:]), self._memory(own, sent.source, *sent.about[1:]))
            for own in ranks
            for to in ranks
            for sent, taken in zip(self._between("send", own, to), self._between("recv", to, own), strict=True)
        ]
        for target, source in [(target, source.copy()) for target, source in moves]:
            target[:] = source

    def _memory(self, rank: int, address: int, count: int, datatype: int) -> Any:
        return memory_of(self.ranks[rank][0], address, count, datatype)


def memory_of(xp: FakeCupy, address: int, count: int, datatype: int) -> Any:
    size = count * np.dtype(KINDS[datatype]).itemsize
    xp.require_own(address, size)
    return np.frombuffer((ctypes.c_char * size).from_address(address), KINDS[datatype])


class ProcessJob:
    """A job of processes that MPI has started."""

    trouble = ""

    def __init__(self) -> None:
        self._ranks: Any = None  # set at the first call, when MPI has started

    def meet(self, nccl: FakeNccl) -> None:
        """Reject communicators that NCCL rejects in the current environment."""
        from mpi4py import MPI

        may_share = nccl.version >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        assert nccl.xp is not None
        ranks = MPI.COMM_WORLD.allgather((os.environ.get("NCCL_HOSTID", "this host"), nccl.xp.device))
        if len(set(ranks)) < len(ranks) and not may_share:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")

    def begin(self, rank: int, xp: FakeCupy, stream: Stream, calls: list[Call]) -> None:
        """Wait for the stream, and for the same call on all ranks."""
        from mpi4py import MPI

        self._ranks = self._ranks or MPI.COMM_WORLD.Dup()
        self.size = self._ranks.size
        stream.run(stream.begun)
        sources = {}
        for call in calls:
            if call.name != "recv":
                peer = call.name == "send"
                count, datatype = call.about[peer : peer + 2]
                count *= self.size if call.name == "reduceScatter" else 1
                sources[call.source] = memory_of(xp, call.source, count, datatype).copy()
        every = self._ranks.allgather(([tuple(call) for call in calls], sources))
        meeting = ProcessMeeting(self, rank, [sources for _, sources in every])
        for other, (made, _) in enumerate(every):
            meeting.ranks[other] = (xp, stream, 0, [Call(*call) for call in made])
        meeting.compare()
        meeting.compute()


class ProcessMeeting(Meeting):
    """A meeting that has only the data sent by other ranks, and drops their results."""

    def __init__(self, job: Any, rank: int, sources: list[dict[int, Any]]) -> None:
        super().__init__(job)
        self._rank, self._sources = rank, sources

    def _memory(self, rank: int, address: int, count: int, datatype: int) -> Any:
        if rank == self._rank:
            return super()._memory(rank, address, count, datatype)
        here = self._sources[rank].get(address, ())
        return here[:count] if len(here) >= count else np.empty(count, KINDS[datatype])

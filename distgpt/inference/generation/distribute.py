"""Many requests on several ranks: each has an engine of its own, and rank 0 hands out requests."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence

from distgpt.core.comm.agree import broadcast, gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.generate.engine import Collector, Engine
from distgpt.core.generate.request import Completion, Request

SYNC = 0.5  # seconds between two exchanges: a rank that has nothing to do waits this long for others

Answer = tuple[int, list[Completion]]  # the number of a request, and its samples
Share = list[tuple[int, Request]]  # requests of a rank, with their numbers


def distribute(comm: Comm, engine: Engine, requests: Sequence[Request], room: int) -> Iterator[list[Answer]]:
    """Compute rank 0's requests on all ranks; yield answers there as they come, in any order. Collective.

    Every rank has to exhaust it. A rank has up to `room` requests at once.
    """
    worker, left, missing = _Worker(engine, room), deque(enumerate(requests)), len(requests)
    while True:
        reports = [pickle.loads(data) for data in gather_bytes(comm, pickle.dumps(worker.report()))]
        shares: list[Share] | None = None
        if comm.rank == 0:
            answers = [answer for done, _ in reports for answer in done]
            if answers:
                yield answers
            missing -= len(answers)
            shares = _deal(left, [free for _, free in reports]) if missing else None
        shares = broadcast(comm, shares)
        if shares is None:
            return
        worker.take(shares[comm.rank])
        worker.work(SYNC, at_once=comm.size == 1)


def _deal(left: deque[tuple[int, Request]], rooms: list[int]) -> list[Share]:
    """Deal out the requests that are left, in turn, as far as each rank has room."""
    shares: list[Share] = [[] for _ in rooms]
    while left and any(len(share) < room for share, room in zip(shares, rooms, strict=True)):
        for share, room in zip(shares, rooms, strict=True):
            if left and len(share) < room:
                share.append(left.popleft())
    return shares


class _Worker:
    """One rank's engine, and what it has finished since the last report."""

    def __init__(self, engine: Engine, room: int) -> None:
        self._collector, self._room = Collector(engine), room
        self._numbers: dict[int, int] = {}  # by ticket
        self._done: list[Answer] = []

    def report(self) -> tuple[list[Answer], int]:
        """Return what is done, and for how many requests more there is room.

        As many again as were done since the last report, so that a fast rank is not idle until the next.
        """
        done, self._done = self._done, []
        return done, max(0, self._room - len(self._numbers)) + len(done)

    def take(self, share: Share) -> None:
        for number, request in share:
            self._numbers[self._collector.submit(request)] = number

    def work(self, seconds: float, at_once: bool) -> None:
        """Run the engine for this long, or until it is idle; `at_once`: or until something is done."""
        until, engine = time.monotonic() + seconds, self._collector.engine
        while not engine.is_idle and time.monotonic() < until and not (at_once and self._done):
            self._done += [(self._numbers.pop(ticket), samples) for ticket, samples in self._collector.step()]

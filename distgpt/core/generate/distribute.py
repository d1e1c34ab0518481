"""Inference on several ranks: many requests distributed over them, or the scores of one averaged.

Distributed, each rank has an engine of its own, and rank 0 hands out requests and takes answers. Averaged,
rank 0 runs one engine, and the others feed what it feeds: every rank computes every token, as in the course
project.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.agree import gather_bytes, shared
from distgpt.core.comm.api import Comm
from distgpt.core.generate.engine import Collector, Engine
from distgpt.core.generate.lanes import Feed, Lanes
from distgpt.core.generate.request import Completion, Request
from distgpt.core.ops.api import Array

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


def averaged(lanes: Lanes, comm: Comm, act: Callable[[Lanes], object]) -> Any:
    """Run `act` on rank 0, with lanes whose scores are the mean over all ranks; elsewhere None. Collective.

    A DistgptError of it is raised by all ranks.
    """
    if comm.rank != 0:
        return _follow(lanes, comm)
    try:
        result = act(_Leading(lanes, comm))
    except DistgptError as error:
        broadcast(comm, ("error", error))
        raise shared(error) from None
    broadcast(comm, ("end",))
    return result


class _Leading:
    """Rank 0's lanes. The others learn of each call before it is made."""

    def __init__(self, own: Lanes, comm: Comm) -> None:
        self._own, self._comm = own, comm
        self.count, self.length, self.can_drop = own.count, own.length, own.can_drop
        self.is_exact = own.is_exact

    def feed(self, work: Sequence[Feed]) -> Array:
        broadcast(self._comm, ("feed", work))
        return _mean(self._own, work, self._comm)

    def copy(self, source: int, target: int, length: int) -> None:
        broadcast(self._comm, ("copy", source, target, length))
        self._own.copy(source, target, length)

    def drop(self, lane: int, count: int, kept: int) -> None:
        broadcast(self._comm, ("drop", lane, count, kept))
        self._own.drop(lane, count, kept)


def _follow(lanes: Lanes, comm: Comm) -> None:
    """Do as rank 0 does until it is done."""
    while True:
        what, *how = broadcast(comm)
        if what == "feed":
            _mean(lanes, how[0], comm)
        elif what == "error":
            raise shared(how[0])
        elif what == "end":
            return
        else:
            getattr(lanes, what)(*how)


def _mean(lanes: Lanes, work: Sequence[Feed], comm: Comm) -> Array:
    scores = np.asarray(lanes.feed([each._replace(likeliest=0) for each in work]))  # a mean needs all
    comm.sum(scores)
    scores /= comm.size
    return scores


def broadcast(comm: Comm, value: object = None) -> Any:
    """Return rank 0's value on every rank. Collective."""
    return pickle.loads(comm.broadcast_bytes(pickle.dumps(value) if comm.rank == 0 else None))

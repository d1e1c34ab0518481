"""Many prompts on several ranks: each has its own engine, rank 0 hands out prompts and takes answers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from distgpt.comm.agree import gather_bytes
from distgpt.comm.api import Comm
from distgpt.inference.completing import Collector
from distgpt.inference.engine import Engine
from distgpt.inference.request import Request, request_of

SYNC = 0.5  # seconds between two exchanges: as long may a rank that has nothing to do wait for others

Answer = tuple[int, list[dict[str, Any]]]  # the number of a request, and its samples as JSON
Asked = tuple[list[int], dict[str, Any]]  # the tokens of a prompt, the settings of its request


def spread(
    comm: Comm, engine: Engine, asked: Sequence[Asked], room: int, answered: Callable[[list[Answer]], None]
) -> None:
    """Answer all that rank 0 was asked; `answered` is called there as they come, in any order. Collective.

    A rank is given as many as its engine has `room` for, and as many again as it finished in between.
    """
    worker, left = _Worker(engine, room), deque(enumerate(asked))
    missing = len(asked)
    while True:
        reports = [json.loads(data) for data in gather_bytes(comm, json.dumps(worker.report()).encode())]
        plan = None
        if comm.rank == 0:
            new = [answer for report in reports for answer in report["done"]]
            answered(new)
            missing -= len(new)
            shares = _shares(left, [report["room"] for report in reports]) if missing else None
            plan = json.dumps(shares).encode()
        shares = json.loads(comm.broadcast_bytes(plan))
        if shares is None:
            return
        worker.take(shares[comm.rank])
        worker.work(SYNC, at_once=comm.size == 1)


def _shares(left: deque[tuple[int, Asked]], rooms: list[int]) -> list[list[tuple[int, Asked]]]:
    """Deal out the requests that are left, in turn, as far as each rank has room."""
    shares: list[list[tuple[int, Asked]]] = [[] for _ in rooms]
    while left and any(len(share) < room for share, room in zip(shares, rooms, strict=True)):
        for share, room in zip(shares, rooms, strict=True):
            if left and len(share) < room:
                share.append(left.popleft())
    return shares


class _Worker:
    """One rank's engine, and what it has finished since the last report."""

    def __init__(self, engine: Engine, room: int) -> None:
        self._engine, self._room = engine, room
        self._collector = Collector()
        self._numbers: dict[int, int] = {}
        self._done: list[Answer] = []

    def report(self) -> dict[str, Any]:
        """What is done, and how many requests more there is room for."""
        done, self._done = self._done, []
        room = max(0, self._room - len(self._numbers)) + len(done)
        return {"done": done, "room": room}

    def take(self, share: Sequence[tuple[int, Asked]]) -> None:
        for number, (tokens, settings) in share:
            request: Request = request_of(tokens, **settings)
            ticket = self._engine.submit(request)
            self._numbers[ticket] = number
            self._collector.expect(ticket, request.n)

    def work(self, seconds: float, at_once: bool) -> None:
        """Run the engine for so long, or until it is idle; `at_once`: or until something is done."""
        until = time.monotonic() + seconds
        while not self._engine.is_idle and time.monotonic() < until and not (at_once and self._done):
            for event in self._engine.step():
                if samples := self._collector.add(event):
                    number = self._numbers.pop(event.ticket)
                    self._done.append((number, [sample.as_json() for sample in samples]))

"""The thread pool of the process: a fixed crew, the caller included, that splits a job and waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

Work = Callable[[int], None]

ALONE, IN_PARTS, SHARED = range(3)  # how a thread computes


class _Place(threading.local):
    """Where a thread stands: its index in the crew, and what it takes part in."""

    member = 0
    mode = ALONE


class Pool:
    """Splits work in three ways.

    `run`: parts 0 … n - 1 of a job, each with a fixed worker. `ranges`: stretches of a range.
    `share`: all workers make the same calls, and every `ranges` in them gives each its own stretch, without
    waiting in between. A `ranges` inside a part of `run` is done whole by the worker of that part. Threads of
    the user that compute at once take turns with the crew.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._place = _Place()
        self._turn = threading.Lock()
        self._work: Work = _nothing
        self._count = 0
        self._mode = ALONE
        self._failure: BaseException | None = None
        self._go = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._done = threading.Semaphore(0)
        for member in range(1, threads):
            threading.Thread(target=self._serve, args=(member,), daemon=True).start()

    @property
    def member(self) -> int:
        """The index of the calling worker, and of its scratch memory."""
        return self._place.member

    def run(self, work: Work, count: int) -> None:
        """Call work(0) … work(count - 1) and wait for all."""
        if self._place.mode != ALONE or self.threads == 1 or count == 1:
            for part in range(count):
                work(part)
        else:
            self._crew(work, count, IN_PARTS)

    def share(self, work: Callable[[], None]) -> None:
        """Call work() on every member at once; see the class."""
        if self._place.mode != ALONE or self.threads == 1:
            work()
        else:
            self._crew(lambda part: work(), self.threads, SHARED)

    def ranges(self, total: int, grain: int, job: Callable[..., Any], *args: Any) -> None:
        """Call job(first, last, *args) on even stretches of range(total), cut at multiples of `grain`."""
        mode = self._place.mode
        if mode == SHARED:
            first, last = self._stretch(self.member, self.threads, total, grain)
            if first < last:
                job(first, last, *args)
        elif mode == IN_PARTS or self.threads == 1 or total <= grain:
            job(0, total, *args)
        else:
            parts = min(self.threads, -(-total // grain))
            self._crew(lambda part: job(*self._stretch(part, parts, total, grain), *args), parts, IN_PARTS)

    @staticmethod
    def _stretch(part: int, parts: int, total: int, grain: int) -> tuple[int, int]:
        blocks = -(-total // grain)
        return blocks * part // parts * grain, min(blocks * (part + 1) // parts * grain, total)

    def _crew(self, work: Work, count: int, mode: int) -> None:
        """Wake a worker per part, do the caller's own parts, wait for the others, raise what they raised."""
        helpers = self._go[: count - 1]
        with self._turn:
            self._work, self._count, self._mode = work, count, mode
            try:
                for go in helpers:
                    go.release()
                self._parts_of(0)
            finally:
                for _ in helpers:
                    self._done.acquire()
                failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _parts_of(self, member: int) -> None:
        self._place.mode = self._mode
        try:
            for part in range(member, self._count, self.threads):
                self._work(part)
        finally:
            self._place.mode = ALONE

    def _serve(self, member: int) -> None:
        self._place.member = member
        while True:
            self._go[member - 1].acquire()
            try:
                self._parts_of(member)
            except BaseException as failure:
                self._failure = failure
            self._done.release()


@cache
def pool_of(threads: int) -> Pool:
    """The pool of so many threads, which all models of this process share."""
    return Pool(threads)


os.register_at_fork(after_in_child=pool_of.cache_clear)  # threads do not survive a fork


def _nothing(part: int) -> None:
    return None

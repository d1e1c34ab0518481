"""The one thread pool of the process: a fixed crew, the caller among them, that splits a job and waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Work = Callable[[int], None]


class Pool:
    """`run(work, count)` calls work(0) … work(count - 1) spread over the crew. Parts have fixed owners.

    The parts of a job that is itself a part run where they are, one after the other.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._place = threading.local()
        self._work: Work = _nothing
        self._count = 0
        self._busy = False
        self._failure: BaseException | None = None
        self._go = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._done = threading.Semaphore(0)
        for member in range(1, threads):
            threading.Thread(target=self._serve, args=(member,), daemon=True).start()

    @property
    def member(self) -> int:
        """Which of the crew is asking: the index of its scratch memory."""
        return getattr(self._place, "member", 0)

    def run(self, work: Work, count: int) -> None:
        if self._busy or self.threads == 1 or count == 1:
            for part in range(count):
                work(part)
            return
        self._work, self._count, self._busy = work, count, True
        helpers = self._go[: count - 1]
        try:
            for go in helpers:
                go.release()
            self._share(0)
        finally:
            for _ in helpers:
                self._done.acquire()
            self._busy = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def ranges(self, total: int, grain: int, job: Callable[..., Any], *args: Any) -> None:
        """Call job(first, last, *args) on even stretches of range(total), cut at multiples of `grain`."""
        if self._busy or self.threads == 1 or total <= grain:
            job(0, total, *args)
            return
        blocks = -(-total // grain)
        parts = min(self.threads, blocks)
        cuts = [min(blocks * part // parts * grain, total) for part in range(parts + 1)]
        self.run(lambda part: job(cuts[part], cuts[part + 1], *args), parts)

    def _share(self, member: int) -> None:
        for part in range(member, self._count, self.threads):
            self._work(part)

    def _serve(self, member: int) -> None:
        self._place.member = member
        while True:
            self._go[member - 1].acquire()
            try:
                self._share(member)
            except BaseException as failure:
                self._failure = failure
            self._done.release()


def _nothing(part: int) -> None:
    return None

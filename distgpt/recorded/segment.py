"""A segment: recorded work that needs no Python, a program of calls for each thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.barrier import counters
from distgpt.core.cpu.pool import Pool
from distgpt.core.ops.api import Work
from distgpt.recorded.calls import Calls
from distgpt.recorded.loops.orders import follow, order, serve
from distgpt.recorded.loops.replay import FAILED, replay
from distgpt.recorded.orders import Orders


class Segment:
    """Programs that all threads follow at once. Calling it lets them."""

    def __init__(self, pool: Pool, calls: Sequence[Calls], at_pauses: Sequence[Work]) -> None:
        """`at_pauses`: what the first thread does in Python where its program pauses."""
        self._pool = pool
        self._at_pauses = at_pauses
        self._calls = calls  # keeps the arrays
        self._programs = [each.program() for each in calls]
        self._counter = counters(1, pool.threads)[0]
        meetings = [self._counter, *(counter for each in calls for counter in each.counters)]
        self._ended_at = np.zeros((pool.threads, 1), np.int64)  # the row where a thread's program ended
        ended = zip(self._programs, self._ended_at, strict=True)
        arguments = [(program, self._counter, pool.threads, at) for program, at in ended]
        self._orders = Orders(pool, follow, arguments, meetings) if pool.threads > 1 else None

    def __call__(self) -> None:
        # All threads have to come to where they meet: a signal waits for the first one's next pause.
        with signals_deferred() as deliver:
            if self._orders is None:
                self._lead(deliver)
            elif failed := self._orders.run(lambda: self._lead(deliver)):
                self._fail(failed[0], int(self._ended_at[failed[0], 0]))

    def _lead(self, deliver: Work) -> None:
        """Follow the first thread's program, with its pauses."""
        at, arrivals, n_threads = 0, 0, self._pool.threads
        for work in (*self._at_pauses, None):
            at, arrivals = replay(self._programs[0], at, self._counter, arrivals, n_threads)
            if at <= FAILED:
                self._fail(0, at)
            if at < 0 or work is None:
                return
            work()
            deliver()

    def _fail(self, thread: int, at: int) -> None:
        raise RuntimeError(f"{dict(self._calls[thread].loops)[FAILED - at]} has failed")


def rehearse(threads: int) -> None:
    """Call the loops that make recorded calls, for whoever notes which loops a run needs."""
    program, counter = Calls().program(), counters(1, 1)[0]
    replay(program, 0, counter, 0, 1)
    if threads > 1:
        follow(program, counter, 1, np.zeros(1, np.int64))
        board = counters(2, 1)
        board[0, :] = 1  # an order, and that helpers are called back
        order(board, 0, 1, 0)
        serve(board, 0, 0, False)

"""A part of recorded work that needs no Python: a program for each thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.barrier import RELEASED, counters
from distgpt.core.cpu.pool import Pool
from distgpt.core.ops.api import Work
from distgpt.recorded.calls import Calls
from distgpt.recorded.loops.replay import FAILED, replay


class Segment:
    """Calls of all threads of a pool. Calling it makes them."""

    def __init__(self, pool: Pool, calls: Sequence[Calls], at_pauses: Sequence[Work]) -> None:
        """`at_pauses`: what the first thread does in Python where its program pauses."""
        self._pool = pool
        self._at_pauses = at_pauses
        self._calls = calls  # keeps the arrays
        self._programs = [each.program() for each in calls]
        self._counter = counters(1, pool.threads)[0]

    def __call__(self) -> None:
        self._counter[0] = 0
        # All threads have to come to where they meet: a signal waits for the first one's next pause.
        with signals_deferred() as deliver:
            self._pool.run_parts(partial(self._run, deliver), self._pool.threads)

    def _run(self, deliver: Work, thread: int) -> None:
        at, arrivals, n_threads = 0, 0, self._pool.threads
        program = self._programs[thread]
        try:
            for work in self._at_pauses if thread == 0 else ():
                at, arrivals = replay(program, at, self._counter, arrivals, n_threads)
                if at < 0:
                    break
                work()
                deliver()
            if at >= 0:
                at, arrivals = replay(program, at, self._counter, arrivals, n_threads)
            if at <= FAILED:
                raise RuntimeError(f"{dict(self._calls[thread].loops)[FAILED - at]} has failed")
        except BaseException:  # the others wait for this thread
            self._counter[0] = RELEASED
            raise

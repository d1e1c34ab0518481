"""Concurrent calls of a compiled loop on all threads of a pool, each with its own arguments.

Python wakes threads one after another, because each needs the GIL: 64 threads take 2 ms. Once assigned here,
helpers stay in compiled code and wait there for the next call, until their pool needs them for a Python job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
from numba import typeof

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.barrier import RELEASED, counters
from distgpt.core.cpu.compiling.jit import Loop, entry
from distgpt.core.cpu.graphs import loops
from distgpt.core.cpu.graphs.calls import Calls, caller, flatten, machine_code
from distgpt.core.cpu.pool import Pool
from distgpt.core.ops.api import Array, Work


class CommandSlot:
    """The helpers' task: a slot in which they wait for calls."""

    def __init__(self, threads: int) -> None:
        _compile_for_helpers()
        self.words = counters(2, threads)
        self.words[0, loops.ADDRESS] = self.words.ctypes.data
        self.failed: Callable[[int], None] = _nothing  # called by a helper whose call has failed

    def serve(self, thread: int) -> None:
        number = loops.serve(self.words, thread, 0, False)
        while number != loops.LEFT:
            self.failed(thread)
            number = loops.serve(self.words, thread, number, True)

    def call_back(self) -> None:
        self.words[0, loops.CALLED_BACK] = 1
        loops.order(self.words, 0, 0, loops.GIVE)


@cache
def _compile_for_helpers() -> None:
    """Compile the helpers' loops in this thread: if that failed in a helper, the others would wait."""
    entry(loops.serve, counters(2, 1), 0, 0, False)
    entry(loops.order, counters(2, 1), 0, 0, 0)


class ParallelLaunch:
    """A repeatable call on each thread of a pool."""

    def __init__(
        self, pool: Pool, loop: Loop, arguments: Sequence[Sequence[object]], meetings: Sequence[Array]
    ) -> None:
        """`arguments`: per thread, of equal types. `meetings`: counters of the threads' barriers.

        Counters start at 0 in each run. A thread that fails releases all waiting threads.
        """
        self._pool, self._meetings = pool, meetings
        self._kept = arguments  # keeps the arrays alive: the words contain their addresses
        self._kinds = tuple(map(typeof, arguments[0]))
        assert all(tuple(map(typeof, each)) == self._kinds for each in arguments), "threads differ in types"
        words = [self._flat(0, each) for each in arguments]
        self._firsts = [len(self._flat(0, arguments[0][:place])) for place in range(len(self._kinds))]
        self._words = np.array(words, np.uint64)
        self._calls = np.zeros((pool.threads, loops.WIDTH), np.int64)
        self._calls[:, 0] = caller(self._kinds)
        self._calls[:, 1] = machine_code(loop, self._kinds)
        self._calls[:, 2] = self._words.ctypes.data + self._words.strides[0] * np.arange(pool.threads)
        self._failed: list[int] = []

    def put(self, place: int, *values: object) -> None:
        """Replace all threads' arguments, of the same types, from this position on.

        The caller must keep the arrays alive as long as calls use them.
        """
        words, first = self._flat(place, values), self._firsts[place]
        self._words[:, first : first + len(words)] = words

    def run(self, own: Work | None = None) -> list[int]:
        """Run all threads' calls, but `own` in the first thread if given. Return the threads that failed.

        An exception of `own` propagates. With `own`, signals must be deferred.
        """
        assert self._pool.free_threads == self._pool.threads, "a job of this pool waits for its helpers"
        self._pool.in_turn(partial(self._run, own))
        return self._failed

    def _run(self, own: Work | None) -> None:
        self._failed = []
        self._set_meetings(0)
        slot = self._pool.task
        if not isinstance(slot, CommandSlot):
            slot = CommandSlot(self._pool.threads)
            self._pool.assign_helpers(slot)
        slot.failed = self._fail
        try:
            self._give(slot.words, own)
        finally:
            slot.failed = _nothing  # the slot outlives this call and would keep our arrays alive

    def _give(self, slot: Array, own: Work | None) -> None:
        calls, threads = self._calls.ctypes.data, self._pool.threads
        if own is None:
            # A single compiled call, so that no signal can interrupt it
            if loops.order(slot, calls, threads, loops.GIVE | loops.OWN | loops.WAIT) != 0:
                self._fail(0)
                loops.order(slot, calls, threads, loops.WAIT)
            return
        loops.order(slot, calls, threads, loops.GIVE)
        try:
            own()
        except BaseException:
            self._set_meetings(RELEASED)
            raise
        finally:
            loops.order(slot, calls, threads, loops.WAIT)

    def _fail(self, thread: int) -> None:
        self._failed.append(thread)
        self._set_meetings(RELEASED)

    def _set_meetings(self, arrivals: int) -> None:
        for counter in self._meetings:
            counter[0] = arrivals

    def _flat(self, place: int, values: Sequence[object]) -> list[int]:
        """Return the words of arguments that start at this position."""
        words: list[int] = []
        for kind, value in zip(self._kinds[place : place + len(values)], values, strict=True):
            flatten(kind, value, words)
        return words


def _nothing(thread: int) -> None:
    return None


class Segment:
    """Captured work without Python, run by one program per thread."""

    def __init__(self, pool: Pool, calls: Sequence[Calls], at_pauses: Sequence[Work]) -> None:
        """`at_pauses`: Python work of the first thread at its program's pauses."""
        self._pool = pool
        self.at_pauses = at_pauses
        self.calls = calls  # keeps the arrays alive
        self.programs = [each.program() for each in calls]
        self._counter = counters(1, pool.threads)[0]
        meetings = [self._counter, *(counter for each in calls for counter in each.counters)]
        self._ended_at = np.zeros((pool.threads, 1), np.int64)  # final row of each thread's program
        ended = zip(self.programs, self._ended_at, strict=True)
        arguments = [(program, self._counter, pool.threads, at) for program, at in ended]
        self._launch = ParallelLaunch(pool, loops.follow, arguments, meetings) if pool.threads > 1 else None

    def __call__(self) -> None:
        # All threads must reach their barriers, so a signal waits for the first thread's next pause.
        with signals_deferred() as deliver:
            if self._launch is None:
                self._lead(deliver)
            elif failed := self._launch.run(lambda: self._lead(deliver)):
                self._fail(failed[0], int(self._ended_at[failed[0], 0]))

    def _lead(self, deliver: Work) -> None:
        """Run the first thread's program, with its pauses."""
        at, arrivals, n_threads = 0, 0, self._pool.threads
        for work in (*self.at_pauses, None):
            at, arrivals = loops.replay(self.programs[0], at, self._counter, arrivals, n_threads)
            if at <= loops.FAILED:
                self._fail(0, at)
            if at < 0 or work is None:
                return
            work()
            deliver()

    def _fail(self, thread: int, at: int) -> None:
        raise RuntimeError(f"{dict(self.calls[thread].loops)[loops.FAILED - at]} has failed")


def warmup_pass(threads: int) -> None:
    """Call the loops that replay captured calls, so that missing ones are recorded."""
    program, counter = Calls().program(), counters(1, 1)[0]
    loops.replay(program, 0, counter, 0, 1)
    if threads > 1:
        loops.follow(program, counter, 1, np.zeros(1, np.int64))
        slot = counters(2, 1)
        slot[0, :] = 1  # a command, and the flag that recalls helpers
        loops.order(slot, 0, 1, 0)
        loops.serve(slot, 0, 0, False)

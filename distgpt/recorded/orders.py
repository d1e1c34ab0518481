"""Orders: a compiled loop that all threads of a pool call at once, each with its own arguments.

Python wakes threads one after the other, as each of them needs its lock: 64 of them take two milliseconds.
Here the helpers, once lent, stay in compiled code and wait for the next order there, until their pool needs
them for a job in Python. Where the system cannot let them sleep there, each order is a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numba import typeof

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.barrier import RELEASED, counters
from distgpt.core.cpu.compiling.jit import Loop, entry
from distgpt.core.cpu.pool import Pool
from distgpt.core.ops.api import Array, Work
from distgpt.recorded.calls import caller, flatten, machine_code
from distgpt.recorded.loops import orders as loops
from distgpt.recorded.loops.replay import WIDTH

CAN_LEND = loops.FUTEX != 0


class Board:
    """Where helpers see their orders: what their pool lends them for."""

    def __init__(self, threads: int) -> None:
        _compile_for_helpers()
        self.words = counters(2, threads)
        self.words[0, loops.ADDRESS] = self.words.ctypes.data
        self.failed: Callable[[int], None] = _nothing  # what a helper does whose call has failed

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
    """Compile here what helpers call: if that failed in one of them, all others would wait for it."""
    entry(loops.serve, counters(2, 1), 0, 0, False)
    entry(loops.order, counters(2, 1), 0, 0, 0)


class Orders:
    """A call for each thread of a pool, which can be made again and again."""

    def __init__(
        self, pool: Pool, loop: Loop, arguments: Sequence[Sequence[Any]], meetings: Sequence[Array]
    ) -> None:
        """`arguments`: those of each thread, of equal types; `meetings`: counters by which threads wait.

        They begin at 0 in each run. A thread that fails lets all pass that wait for it.
        """
        self._pool, self._meetings = pool, meetings
        self._kept = arguments  # what holds arrays, whose addresses are written down
        self._kinds = tuple(map(typeof, arguments[0]))
        assert all(tuple(map(typeof, each)) == self._kinds for each in arguments), "threads differ in types"
        words = [self._flat(0, each) for each in arguments]
        self._firsts = [len(self._flat(0, arguments[0][:place])) for place in range(len(self._kinds))]
        self._words = np.array(words, np.uint64)
        self._calls = np.zeros((pool.threads, WIDTH), np.int64)
        self._calls[:, 0] = caller(self._kinds)
        self._calls[:, 1] = machine_code(loop, self._kinds, arguments[0])
        self._calls[:, 2] = self._words.ctypes.data + self._words.strides[0] * np.arange(pool.threads)
        self._failed: list[int] = []

    def put(self, place: int, *values: Any) -> None:
        """Let all threads get other arguments, of the same types, from this place on.

        Their arrays have to live as long as orders run with them.
        """
        words, first = self._flat(place, values), self._firsts[place]
        self._words[:, first : first + len(words)] = words

    def run(self, own: Work | None = None) -> list[int]:
        """Let all threads make their calls, but the first one do `own` if given. Return whose calls failed.

        Where `own` fails, so does this. A signal may come where there is no `own`; else it must be deferred.
        """
        assert self._pool.free_threads == self._pool.threads, "a job of this pool waits for its helpers"
        if CAN_LEND:
            self._pool.in_turn(partial(self._run_lent, own))
        else:
            self._begin()
            with signals_deferred():  # or helpers would wait where they meet
                self._pool.run_parts(lambda thread: self._do_part(thread, own), self._pool.threads)
        return self._failed

    def _begin(self) -> None:
        self._failed = []
        self._set_meetings(0)

    def _run_lent(self, own: Work | None) -> None:
        self._begin()
        board = self._pool.loan
        if not isinstance(board, Board):
            board = Board(self._pool.threads)
            self._pool.lend(board)
        board.failed = self._fail
        try:
            self._give(board.words, own)
        finally:
            board.failed = _nothing  # the board lives on, and would keep our arrays

    def _give(self, board: Array, own: Work | None) -> None:
        calls, threads = self._calls.ctypes.data, self._pool.threads
        if own is None:
            # One compiled call: no signal can come between its parts.
            if loops.order(board, calls, threads, loops.GIVE | loops.OWN | loops.WAIT) != 0:
                self._fail(0)
                loops.order(board, calls, threads, loops.WAIT)
            return
        loops.order(board, calls, threads, loops.GIVE)
        try:
            own()
        except BaseException:
            self._set_meetings(RELEASED)
            raise
        finally:
            loops.order(board, calls, threads, loops.WAIT)

    def _do_part(self, thread: int, own: Work | None) -> None:
        """Do a thread's part where helpers are not lent."""
        calls = self._calls[thread:].ctypes.data
        if own is not None and thread == 0:
            try:
                own()
            except BaseException:
                self._set_meetings(RELEASED)
                raise
        elif loops.order(_NO_BOARD, calls, self._pool.threads, loops.OWN) != 0:
            self._fail(thread)

    def _fail(self, thread: int) -> None:
        self._failed.append(thread)
        self._set_meetings(RELEASED)

    def _set_meetings(self, arrivals: int) -> None:
        for counter in self._meetings:
            counter[0] = arrivals

    def _flat(self, place: int, values: Sequence[Any]) -> list[int]:
        """Return the words of arguments that begin with this one."""
        words: list[int] = []
        for kind, value in zip(self._kinds[place : place + len(values)], values, strict=True):
            flatten(kind, value, words)
        return words


_NO_BOARD = counters(2, 1)


def _nothing(thread: int) -> None:
    return None

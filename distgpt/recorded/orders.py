"""Orders: a compiled loop that all threads of a pool call at once, each with its own arguments.

Python wakes threads one after the other, as each of them needs its lock: 64 of them take two milliseconds.
Here the helpers, once lent, stay in compiled code and wait for the next order there, until their pool needs
them for a job in Python. Where the system cannot let them sleep there, each order is a job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import typeof

from distgpt.core.cpu.compiling.barrier import counters
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.pool import Pool
from distgpt.core.ops.api import Array, Work
from distgpt.recorded.calls import WORD, caller, flatten, machine_code
from distgpt.recorded.loops import orders as loops
from distgpt.recorded.loops.replay import WIDTH


class Board:
    """Where helpers see their orders: what their pool lends them for."""

    def __init__(self, threads: int) -> None:
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


class Orders:
    """A call for each thread of a pool, which can be made again and again."""

    def __init__(self, pool: Pool, loop: Loop, arguments: Sequence[Sequence[Any]], release: Work) -> None:
        """`arguments`: those of each thread, of equal types; `release` lets all pass who wait for another."""
        self._pool, self._release = pool, release
        self._kept = arguments  # what holds arrays, whose addresses are written down
        self._kinds = tuple(map(typeof, arguments[0]))
        words = [self._flat(0, each) for each in arguments]
        self._words = np.array(words, np.uint64)
        of_thread = self._words.ctypes.data + WORD * len(words[0]) * np.arange(len(words))
        self._calls = np.zeros((pool.threads, WIDTH), np.int64)
        self._calls[:, 0] = caller(self._kinds)
        self._calls[:, 1] = machine_code(loop, self._kinds, arguments[0])
        self._calls[:, 2] = of_thread
        self._failed: list[int] = []

    def put(self, place: int, *values: Any) -> None:
        """Let all threads get other arguments from this place on. The caller keeps their arrays."""
        first = len(self._flat(0, self._kept[0][:place]))
        words = self._flat(place, values)
        self._words[:, first : first + len(words)] = words

    def run(self, own: Work | None = None) -> list[int]:
        """Let all threads make their calls, but the first one do `own` if given. Return whose calls failed.

        Where `own` fails, the others are released.
        """
        self._failed = []
        if loops.FUTEX:
            with self._pool.turn():
                self._give(self._board().words, own)
        else:
            self._pool.run_parts(lambda thread: self._one(thread, own), self._pool.threads)
        return self._failed

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
            self._release()
            raise
        finally:
            loops.order(board, calls, threads, loops.WAIT)

    def _board(self) -> Board:
        """Return the board that the pool's helpers look at, and let it see this order's failures."""
        board = self._pool.loan
        if not isinstance(board, Board):
            board = Board(self._pool.threads)
            self._pool.lend(board)
        board.failed = self._fail
        return board

    def _one(self, thread: int, own: Work | None) -> None:
        """Do a thread's part where helpers are not lent."""
        calls = self._calls[thread:].ctypes.data
        if own is not None and thread == 0:
            try:
                own()
            except BaseException:
                self._release()
                raise
        elif loops.order(_NO_BOARD, calls, self._pool.threads, loops.OWN) != 0:
            self._fail(thread)

    def _fail(self, thread: int) -> None:
        self._failed.append(thread)
        self._release()

    def _flat(self, place: int, values: Sequence[Any]) -> list[int]:
        """Return the words of arguments that begin with this one."""
        words: list[int] = []
        for kind, value in zip(self._kinds[place:], values, strict=False):
            flatten(kind, value, words)
        return words


_NO_BOARD = counters(2, 1)


def _nothing(thread: int) -> None:
    return None

"""Helpers of a pool that wait for orders in compiled code, where nobody needs Python's lock to wake them."""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from distgpt.core.cpu.compiling.barrier import arrive, arrived, barrier, pause
from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.recorded.loops.replay import FAILED, WIDTH, call, replay

# A board is two of `barrier.counters`. The first counts orders. Its further words are how often a helper
# looks before it sleeps, the address of the count, that of the calls, a row for each thread, and whether
# helpers are called back. The second counts the threads that have carried out an order.
ADDRESS, CALLS, CALLED_BACK = 2, 3, 4
LEFT = -1  # what `serve` returns once it was called back
GIVE, OWN, WAIT = 1, 2, 4

# Linux lets threads sleep while a word of memory stays as it is, and wakes all of them by one call.
# The number of that system call; 0: there is none.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
FUTEX_WAIT, FUTEX_WAKE, ALL = 128, 129, (1 << 31) - 1  # 128 is the flag "private": of this process alone
LOW = (1 << 32) - 1  # a futex has 32 bits: the lower half of the count, which comes first on these processors
_system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

_I64 = ir.IntType(64)


@jit
def serve(board, thread, number, has_failed):
    """Carry out each order after order `number`; return the number of one whose call failed, or LEFT.

    `has_failed`: this thread's call of order `number` has, and is not counted yet.
    """
    orders, done = board[0], board[1]
    while True:
        if has_failed:
            arrive(done)
        _await_order(orders, number)
        if orders[CALLED_BACK]:
            return LEFT
        number += 1
        if _call_row(orders[CALLS], thread) != 0:
            return number
        has_failed = False
        arrive(done)


@jit
def order(board, calls, n_threads, what):
    """Do what `what` names: GIVE an order, make the first row's call as one's OWN, WAIT for the helpers.

    Return the status of that call.
    """
    orders = board[0]
    if what & GIVE:
        orders[CALLS] = calls
        arrive(orders)
        if FUTEX:
            _system_call(FUTEX, orders[ADDRESS], FUTEX_WAKE, ALL, 0, 0, 0)
    status = _call_row(calls, 0) if what & OWN else 0
    if what & WAIT and status == 0:  # after a failure helpers may wait for this thread inside their calls
        barrier(board[1], arrived(orders) * n_threads)
    return status


@jit
def follow(program, counter, n_threads, ended_at):
    """Make the calls of a program that does not pause; fail where one of them does, with its row."""
    at, _ = replay(program, 0, counter, 0, n_threads)
    ended_at[0] = at
    if at <= FAILED:
        raise RuntimeError


@inline
def _await_order(orders, number):
    looks = 0
    while arrived(orders) == number:
        looks += 1
        if looks < orders[1]:
            pause()
        else:  # returns at once if the count has changed by then
            _system_call(FUTEX, orders[ADDRESS], FUTEX_WAIT, number & LOW, 0, 0, 0)


@inline
def _call_row(calls, thread):
    row = calls + 8 * WIDTH * thread
    return call(_word(row), _word(row + 8), _word(row + 16))


@intrinsic
def _word(context, address=None):
    """Read the word at an address."""

    def generate(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], _I64.as_pointer()))

    return types.int64(types.int64), generate

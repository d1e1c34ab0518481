"""Compiled loops that replay captured calls, and the loop in which helpers wait for commands.

Helpers in compiled code wake without the GIL.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from distgpt.core.cpu.compiling.barrier import RELEASED, arrive, arrived, barrier, pause
from distgpt.core.cpu.compiling.jit import inline, jit

_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)
WORD = 8  # bytes

# A program is rows of three words. A call is the addresses of the caller, the function and the arguments.
# Otherwise, the first word is one of:
END, MEET, PAUSE = 0, 1, 2
WIDTH = 3
# `replay` returns one of these if it did not reach a pause.
DONE, FAILED = -1, -2  # FAILED - row


@jit
def replay(program, at, counter, arrivals, n_threads):
    """Make the calls from row `at` on; return (next row, arrivals).

    Instead of a row, DONE marks the end or a release by another thread, and FAILED - row a failed call.
    """
    while True:
        what = program[at, 0]
        if what == END:
            return DONE, arrivals
        if what == PAUSE:
            return at + 1, arrivals
        if what == MEET:
            arrivals += n_threads
            barrier(counter, arrivals)
            if arrived(counter) >= RELEASED:
                return DONE, arrivals
        elif call(what, program[at, 1], program[at, 2]) != 0:
            return FAILED - at, arrivals
        at += 1


@intrinsic
def call(context, caller=None, function=None, arguments=None):
    """Call the function at an address with two other addresses."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(_I32, [_I64, _I64]).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), values[1:])

    return types.int32(types.int64, types.int64, types.int64), generate


# A command slot is two of `barrier.counters`. The first counts commands. Its other words are the number of
# checks before a helper sleeps, the address of the count, the address of the calls (a row per thread), and
# whether helpers are recalled. The second counts the threads that have finished a command.
ADDRESS, CALLS, CALLED_BACK = 2, 3, 4
LEFT = -1  # returned by `serve` after a recall
GIVE, OWN, WAIT = 1, 2, 4

# The number of Linux's futex system call, or 0 if there is none. With it, threads sleep while a word of
# memory is unchanged, and one call wakes them all.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
FUTEX_WAIT, FUTEX_WAKE, ALL = 128, 129, (1 << 31) - 1  # 128 is the "private" flag: only this process
LOW = (1 << 32) - 1  # a futex has 32 bits: the lower half of the count, first on little-endian processors
_system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))
NAP = 100  # microseconds between checks without futexes


@jit
def serve(slot, thread, number, has_failed):
    """Execute each command after `number`. Return the number of one whose call failed, or LEFT.

    `has_failed` means that this thread's call of command `number` failed and is not counted yet.
    """
    orders, done = slot[0], slot[1]
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
def order(slot, calls, n_threads, what):
    """GIVE a command, make this thread's OWN call (row 0), WAIT for helpers, by the flags in `what`.

    Return the status of the own call.
    """
    orders = slot[0]
    if what & GIVE:
        orders[CALLS] = calls
        arrive(orders)
        if FUTEX:
            _system_call(FUTEX, orders[ADDRESS], FUTEX_WAKE, ALL, 0, 0, 0)
    status = _call_row(calls, 0) if what & OWN else 0
    if what & WAIT and status == 0:  # after a failure, helpers may wait for this thread inside their calls
        barrier(slot[1], arrived(orders) * n_threads)
    return status


@jit
def follow(program, counter, n_threads, ended_at):
    """Make the calls of a program without pauses. On failure, raise an error and store the row."""
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
        elif not FUTEX:
            _sleep(NAP)
        else:  # returns immediately if the count has changed
            _system_call(FUTEX, orders[ADDRESS], FUTEX_WAIT, number & LOW, 0, 0, 0)


@inline
def _call_row(calls, thread):
    row = calls + 8 * WIDTH * thread
    return call(_word(row), _word(row + 8), _word(row + 16))


@intrinsic
def _word(context, address=None):
    def generate(context, builder, signature, values):
        return builder.load(builder.inttoptr(values[0], _I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def unpack_args(context, packed=None):
    """Return the values of `PackedArgs` (calls.py)."""

    def generate(context, builder, signature, values):
        packer = context.get_arg_packer([packed.kind])
        leaves = [loaded(builder, values[0], i, leaf) for i, leaf in enumerate(packer.argument_types)]
        return packer.from_arguments(builder, leaves)[0]

    return packed.kind(packed), generate


def loaded(builder: ir.IRBuilder, words: ir.Value, i: int, kind: ir.Type) -> ir.Value:
    """Read word i at an address as the type that LLVM code takes."""
    address = builder.add(words, _I64(WORD * i))
    if isinstance(kind, ir.IntType) and kind.width < 8:  # a bool
        return builder.trunc(builder.load(builder.inttoptr(address, _I8.as_pointer())), kind)
    return builder.load(builder.inttoptr(address, kind.as_pointer()))

"""Make the calls of a thread's program, one after the other, and meet the other threads where it says so."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from distgpt.core.cpu.compiling.barrier import RELEASED, arrived, barrier
from distgpt.core.cpu.compiling.jit import jit

# A program is rows of three words: a call is the addresses of what calls, of what is called and of its
# arguments. Where the first word is none of these addresses, it is one of:
END, MEET, PAUSE = 0, 1, 2
WIDTH = 3
# What `replay` returns where it did not come to a pause.
DONE, FAILED = -1, -2  # FAILED - row

_I64, _I32 = ir.IntType(64), ir.IntType(32)


@jit
def replay(program, at, counter, arrivals, n_threads):
    """Make the calls from row `at` on; return (the row to go on at, arrivals so far).

    The row is DONE at the end, or once a thread has released the others; FAILED - row after a call that
    failed.
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
    """Call what lies at an address with two more."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(_I32, [_I64, _I64]).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), values[1:])

    return types.int32(types.int64, types.int64, types.int64), generate

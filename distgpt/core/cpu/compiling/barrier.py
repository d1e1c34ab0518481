"""A barrier for compiled calls, based on a counter of arrivals."""

from __future__ import annotations

import platform
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from distgpt.core.comm.resources import usable_cores
from distgpt.core.cpu.compiling.jit import inline
from distgpt.core.ops.api import Array

LINE = 64  # bytes of a cache line
SPINS = 2_000  # checks of the counter, tens of µs, before a thread yields its core
RELEASED = 1 << 62  # value of a counter that no longer blocks: a thread failed before its call started

_I64 = ir.IntType(64)
_X86: tuple[str, list[ir.Constant]] = ("llvm.x86.sse2.pause", [])
_ARM = ("llvm.aarch64.hint", [ir.IntType(32)(1)])
PAUSES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def counters(count: int, n_threads: int) -> Array:
    """Make counters of arrivals for `n_threads` threads, each in its own cache line.

    Word 0 is the count and must be 0 when a call starts. Word 1 is how often a thread checks the count before
    it yields its core. It is 0 if there are fewer cores than threads, because a spinning thread would delay
    the others.
    """
    raw = np.zeros((count + 1) * LINE, np.ubyte)
    first = -raw.ctypes.data % LINE
    result = raw[first : first + count * LINE].view(np.int64).reshape(count, LINE // 8)
    result[:, 1] = SPINS if n_threads <= len(usable_cores()) else 0
    return result


class Member(NamedTuple):
    """A thread's number in the team that shares a job, with the job's counter."""

    number: int
    members: int
    counter: Array


@inline
def wait_for_all(counter, arrivals, n_threads):
    """Wait for all threads and return the number of arrivals. `counter` is one of `counters`."""
    if n_threads > 1:
        barrier(counter, arrivals + n_threads)
    return arrivals + n_threads


@inline
def barrier(counter, arrivals):
    """Arrive, and return when `arrivals` threads have arrived since the call started."""
    arrive(counter)
    spins = 0
    while arrived(counter) < arrivals:
        spins += 1
        if spins < counter[1]:
            pause()
        else:
            _yield_core()


def _first(context, builder, signature, values):
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return cgutils.gep_inbounds(builder, array.data, 0)


@intrinsic
def arrive(context, counter=None):
    def generate(context, builder, signature, values):
        builder.atomic_rmw("add", _first(context, builder, signature, values), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.none(counter), generate


@intrinsic
def arrived(context, counter=None):
    """Return the number of arrivals. Writes made before them are visible."""

    def generate(context, builder, signature, values):
        return builder.load_atomic(_first(context, builder, signature, values), "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def pause(context):
    """Hint to the core that this loop is spinning. No-op on unknown processors."""

    def generate(context, builder, signature, values):
        name, arguments = PAUSES.get(platform.machine().lower(), ("", []))
        if name:
            kinds = [value.type for value in arguments]
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), kinds), name
            )
            builder.call(function, arguments)
        return context.get_dummy_value()

    return types.none(), generate

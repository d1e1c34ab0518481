"""A barrier inside compiled calls: threads count themselves in, and wait until all are there."""

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
SPINS = 2_000  # looks at the counter, tens of µs, before a thread yields its core
RELEASED = 1 << 62  # a counter of which nobody waits any more: a thread failed before its call began

_I64 = ir.IntType(64)
_X86: tuple[str, list[ir.Constant]] = ("llvm.x86.sse2.pause", [])
_ARM = ("llvm.aarch64.hint", [ir.IntType(32)(1)])
PAUSES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def counters(count: int, n_threads: int) -> Array:
    """Make counters of arrivals of so many threads, each alone in its cache line.

    The first word of each counts, and is to be 0 when a call begins. The second is how often to look before a
    thread yields its core: not once where there are fewer cores than threads, as whoever looks keeps the
    others from arriving.
    """
    raw = np.zeros((count + 1) * LINE, np.ubyte)
    first = -raw.ctypes.data % LINE
    found = raw[first : first + count * LINE].view(np.int64).reshape(count, LINE // 8)
    found[:, 1] = SPINS if n_threads <= len(usable_cores()) else 0
    return found


class Member(NamedTuple):
    """One of the threads that share a job; a counter is of one job."""

    number: int
    members: int
    counter: Array


@inline
def wait_for_all(counter, arrivals, n_threads):
    """Wait for all threads; return the number of arrivals so far. `counter` is one of `counters`."""
    if n_threads > 1:
        barrier(counter, arrivals + n_threads)
    return arrivals + n_threads


@inline
def barrier(counter, arrivals):
    """Arrive, and return when `arrivals` threads have, since the call began."""
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
    """Count one more arrival."""

    def generate(context, builder, signature, values):
        builder.atomic_rmw("add", _first(context, builder, signature, values), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.none(counter), generate


@intrinsic
def arrived(context, counter=None):
    """Return the arrivals so far; what came before them can be read."""

    def generate(context, builder, signature, values):
        return builder.load_atomic(_first(context, builder, signature, values), "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def pause(context):
    """Tell the core that this loop waits; nothing on unknown processors."""

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

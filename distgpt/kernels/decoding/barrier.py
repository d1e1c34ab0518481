"""A barrier inside compiled calls: threads count themselves in, and spin until all are there."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from distgpt.kernels.api import Array
from distgpt.kernels.fused.jit import inline
from distgpt.kernels.matmul.packing import LINE, aligned

SPINS = 2_000  # looks at the counter, some 30 µs, before a thread yields its core

_ir: Any = ir
_cgutils: Any = cgutils
_I64 = _ir.IntType(64)
_X86: Any = ("llvm.x86.sse2.pause", [])
_ARM: Any = ("llvm.aarch64.hint", [_ir.IntType(32)(1)])
PAUSES: Any = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_yield_core = types.ExternalFunction("sched_yield", types.int32())


def counter() -> Array:
    """Make a counter of arrivals, alone in its cache line; it must be 0 when a call begins."""
    return aligned((LINE // 8,), "int64")


@inline
def barrier(counter, arrivals):
    """Arrive, and return when `arrivals` threads have, since the call began."""
    _arrive(counter)
    spins = 0
    while _arrived(counter) < arrivals:
        spins += 1
        if spins < SPINS:
            _pause()
        else:
            _yield_core()


def _first(context, builder, signature, values):
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return _cgutils.gep_inbounds(builder, array.data, 0)


@intrinsic
def _arrive(context, counter=None):
    def generate(context, builder, signature, values):
        builder.atomic_rmw("add", _first(context, builder, signature, values), _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.none(counter), generate


@intrinsic
def _arrived(context, counter=None):
    def generate(context, builder, signature, values):
        return builder.load_atomic(_first(context, builder, signature, values), "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def _pause(context):
    """Tell the core that this loop waits; nothing on unknown processors."""

    def generate(context, builder, signature, values):
        name, arguments = PAUSES.get(platform.machine().lower(), ("", []))
        if name:
            kinds = [value.type for value in arguments]
            function = _cgutils.get_or_insert_function(
                builder.module, _ir.FunctionType(_ir.VoidType(), kinds), name
            )
            builder.call(function, arguments)
        return context.get_dummy_value()

    return types.none(), generate

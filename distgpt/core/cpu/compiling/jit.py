"""Compilation of loops with Numba, bfloat16 access in loops, and a fast exponential."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, typeof, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic, overload

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.disk_cache import keep_on_disk

Loop = Callable[..., Any]

I32, I16, F32 = ir.IntType(32), ir.IntType(16), ir.FloatType()
# Constants of exp in float32: ln 2 in two parts, the Taylor coefficients of eʳ = … + r²/2! + r + 1, and an
# argument whose result is 0. The first part of ln 2 has 9 bits, so n times it is exact (Cody and Waite,
# Cephes).
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
TAYLOR = tuple(1 / math.factorial(k) for k in (7, 6, 5, 4, 3, 2))
LEAST = -88.0


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of one function, linked only into the code of its callers.

    Numba would also compile each such function to machine code, with wrappers for Python and C that are never
    called. That takes 20% of a run's compile time. Numba also optimizes these functions separately. Without
    that step, compilation takes 33% less time, but loops are 1% slower and round differently.

    If a later Numba renames these methods, functions compile as usual, only more slowly.
    """

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # functions with addresses of this process are not kept on disk
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # no machine code exists

    @property
    def codegen(self) -> object:
        return self  # only for `set_env`

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing. This would pass Python objects to the code, and loops have none."""


class InlinedCompiler(Compiler):  # type: ignore[misc]
    """Numba's pipeline with a `_Library`."""

    def define_pipelines(self) -> object:
        self.state.library = _Library(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


# LLVM does the inlining. Numba's own inlining fails if an argument contains a condition.
_INLINED: dict[str, object] = {"forceinline": True, "pipeline_class": InlinedCompiler}
FORCED: dict[str, object] = {**_INLINED, "error_model": "numpy"}
# Allow reordered sums and fused multiply-adds, but keep inf and NaN: a diverged run must show.
_FAST = {"contract", "reassoc", "nsz", "arcp", "afn"}
# Loops allocate nothing, so reference counts, a call for every slice, are unnecessary. C wrappers are
# unnecessary because C code calls no loop.
_NO_C: dict[str, object] = {"no_cfunc_wrapper": True}
_OPTIONS = {"nogil": True, "_nrt": False, "fastmath": _FAST, "error_model": "numpy", **_NO_C}


def jit(function: Loop, is_kept: bool = True) -> Loop:
    """Compile a loop on first use, keep it on disk, and run it without the GIL."""
    compiled = njit(**_OPTIONS)(function)
    if is_kept:
        keep_on_disk(compiled)
    # LLVM calls back into Python during compilation and loading, so signals must wait.
    compiled.compile = signals_deferred()(compiled.compile)
    loop: Loop = compiled
    return loop


def by_types(**options: object) -> Callable[[Loop], Loop]:
    """Decorate a function that selects an implementation by argument types when a loop is compiled."""

    def made(choose: Loop) -> Loop:
        @wraps(choose)
        def function(*arguments: object) -> None:
            raise NotImplementedError("only compiled loops call this")

        overload(function, jit_options=_NO_C | options)(choose)
        return function

    return made


def also_for(function: Loop, **options: object) -> Callable[[Loop], Loop]:
    """Add an implementation to a `by_types` function. `choose` returns None for other types."""

    def added(choose: Loop) -> Loop:
        overload(function, jit_options=_NO_C | options)(choose)
        return choose

    return added


def inline(function: Loop) -> Loop:
    """Compile a function into the loops that call it.

    A separate call would link to one of two copies that round differently. The process that compiles uses one
    copy, and processes that load the result from disk the other.
    """
    compiled: Loop = njit(**_OPTIONS, **_INLINED, no_cpython_wrapper=True)(function)
    return compiled


@intrinsic
def _widened(context, bits=None):
    """Widen bfloat16 bits to float32. Written as IR because Numba would compute in 64 bits."""

    def generate(context, builder, signature, values):
        wide = builder.zext(values[0], I32)
        return builder.bitcast(builder.shl(wide, I32(16)), F32)

    return types.float32(types.uint16), generate


@intrinsic
def _narrowed(context, value=None):
    """Round a float32 to the nearest bfloat16, ties to even; NaN becomes a quiet NaN."""

    def generate(context, builder, signature, values):
        return _nearest(builder, values[0])

    return types.uint16(types.float32), generate


def _nearest(builder, value):
    bits = builder.bitcast(value, I32)
    upper = builder.lshr(bits, I32(16))
    half = builder.add(builder.and_(upper, I32(1)), I32(0x7FFF))
    nearest = builder.lshr(builder.add(bits, half), I32(16))
    quiet = builder.or_(upper, I32(0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, nearest), I16)


@intrinsic
def zip_bits(context, first=None, second=None):
    """Pack two bfloat16 into a 32-bit word, the first in the lower half."""

    def generate(context, builder, signature, values):
        return _zipped(builder, *values)

    return types.uint32(types.uint16, types.uint16), generate


@intrinsic
def zip_narrowed(context, first=None, second=None):
    """Round two float32 to bfloat16 and pack them into a 32-bit word, the first in the lower half."""

    def generate(context, builder, signature, values):
        return _zipped(builder, *(_nearest(builder, value) for value in values))

    return types.uint32(types.float32, types.float32), generate


def _zipped(builder, low, high):
    return builder.or_(builder.zext(low, I32), builder.shl(builder.zext(high, I32), I32(16)))


@by_types(**FORCED)
def get(x, j):
    """Read x[j] in compiled loops as a number; arrays of uint16 hold bfloat16 bits."""

    def same(x, j):
        return x[j]

    def widened(x, j):
        return _widened(x[j])

    return widened if x.dtype == types.uint16 else same


@by_types(**FORCED)
def put(x, j, value):
    """x[j] ← value, rounded to x's type; ties to even."""

    def same(x, j, value):
        x[j] = value

    def narrow(x, j, value):
        x[j] = _narrowed(np.float32(value))

    return narrow if x.dtype == types.uint16 else same


@by_types(**FORCED)
def number(x, value):
    """Convert a number to the type used to compute with the array's elements."""
    real = np.float64 if x.dtype == types.float64 else np.float32

    def converted(x, value):
        return real(value)

    return converted


@intrinsic
def _larger(context, x=None, y=None):
    """Return the larger of two numbers, not NaN. Numba's `max` and comparisons prevent vectorization."""

    def generate(context, builder, signature, values):
        a, b = values
        return builder.select(builder.fcmp_ordered(">", a, b, flags=("fast",)), a, b, flags=("fast",))

    return x(x, x), generate


@inline
def largest(row):
    """Return the maximum of a row, vectorized under the assumption that it has no NaN.

    In a row with NaN the result may be any element. The NaN then shows in the next computation.
    """
    top = get(row, 0)
    for j in range(row.shape[0]):
        top = _larger(get(row, j), top)
    return top


@by_types(**(FORCED | {"fastmath": _FAST}))
def exp(x):
    """Return eˣ in compiled loops. float32 uses a polynomial (relative error 1.2e-7) that vectorizes."""
    if x != types.float32:

        def exp64(x):
            return math.exp(x)

        return exp64

    log2e, ln2_high, ln2_low = (np.float32(x) for x in (LOG2_E, LN2_HIGH, LN2_LOW))
    half, one, low, high = (np.float32(x) for x in (0.5, 1, LEAST, -LEAST))
    c7, c6, c5, c4, c3, c2 = (np.float32(x) for x in TAYLOR)

    def exp32(x):
        # x = n ln 2 + r with |r| ≤ ln 2 / 2: compute eʳ by a Taylor sum and write 2ⁿ into the exponent bits.
        # The comparisons let NaN pass. From -87.7 down, 2ⁿ is 0.
        bounded = low if x < low else (high if x > high else x)
        n = np.floor(bounded * log2e + half)
        r = bounded - n * ln2_high - n * ln2_low
        e = ((((((c7 * r + c6) * r + c5) * r + c4) * r + c3) * r + c2) * r + one) * r + one
        return e * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)

    return exp32


def entry(loop: Loop, *arguments: object) -> Loop:
    """Return a loop's machine code for these argument types. It does not check the types again."""
    assert isinstance(loop, Dispatcher)
    result: Loop = loop.compile(tuple(map(typeof, arguments)))
    return result

"""Microkernels as machine code: assembled once per processor, kept on disk, called by compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256

import llvmlite
import llvmlite.binding as llvm
from numba import types

from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.compiling.jit import by_types, inline
from distgpt.core.cpu.compiling.processor import BFLOAT16, FLOAT32, Shape, processor, shape
from distgpt.core.cpu.matmul import amx, microkernel, widening
from distgpt.core.cpu.matmul.vectors import moves

_engines: list[llvm.ExecutionEngine] = []  # keeps the code alive


def machine_code(name: str, text: Callable[[], str]) -> bytes:
    """Return the object file of some IR, from the disk cache if possible."""
    key = repr((name, shape(), processor(), llvmlite.__version__)).encode()
    file = f"{name}-{sha256(key).hexdigest()[:16]}.o"
    return disk_cache.read_or_make(file, lambda: bytes(machine().emit_object(verified(text()))))


def machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    return llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3)


def verified(text: str) -> llvm.ModuleRef:
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    return parsed


def external(
    name: str, text: Callable[[], str], **functions: tuple[types.Type, ...]
) -> dict[str, types.ExternalFunction]:
    """Return the functions of some IR for compiled loops, given their argument types."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code(name, text)))
    engine.finalize_object()
    _engines.append(engine)
    result = {}
    for function, arguments in functions.items():
        symbol = f"distgpt_{name}_{function}"
        llvm.add_symbol(symbol, engine.get_function_address(function))
        result[function] = types.ExternalFunction(symbol, types.void(*arguments))
    return result


_I = types.int64
_P = types.voidptr


def tile_text(shape: Shape, operand: str, out: str) -> str:
    if operand == BFLOAT16 and shape.amx:
        return amx.module(shape, operand, out)
    if shape.widens(operand) and shape.lanes == 16:
        return widening.module(shape, operand, out)
    return microkernel.module(shape, operand, out)


def _tile_of(operand: str, out: str) -> types.ExternalFunction:
    text = partial(tile_text, shape(), operand, out)
    return external(f"tile-{operand}-{out}", text, tile=(_I, _I, _P, _I, _I, _P, _P, _I, _I, _P, _I))["tile"]


NAMES = {types.float32: FLOAT32, types.uint16: BFLOAT16}
# Registered when this file is imported: loops loaded from disk call these by name.
_TILES = {pair: _tile_of(*pair) for pair in ((FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16))}
_MOVES = external(
    "moves",
    partial(moves, shape().lanes),
    transpose=(_P, _I, _P, _I, _I),
    zip=(_P, _I, _P, _I, _I),
    copy=(_P, _I, _P, _I, _I),
    prefetch=(_P, _I, _P, _I, _I),
)
# AMX is slower with an A packed by pairs of k than by rows, so A is reordered to rows once for all tiles. The
# row stride after that, in bytes, and the k reordered at a time.
_ROW, PACKED_K = (amx.LINE, amx.DEPTH) if shape().amx else (4, 1)
_ROWS = external("rows", amx.packed_by_rows, rows=(_P, _I))["rows"] if shape().amx else None
_TRANSPOSE, _COPY, _PREFETCH = _MOVES["transpose"], _MOVES["copy"], _MOVES["prefetch"]
WORDS_BYTES = 4 * shape().lanes


@by_types()
def tile(rows, k, a, row, step, b, c, ldc, columns, bias, flags):
    """Compute a tile of C in compiled loops; see microkernel.py. Arrays of bfloat16 have type uint16.

    In bfloat16, one of `row` and `step` is 4. Without the flag BIAS, `bias` can be any array.
    """
    routine = _TILES[NAMES[a.dtype], NAMES[c.dtype]]

    def call(rows, k, a, row, step, b, c, ldc, columns, bias, flags):
        routine(rows, k, a.ctypes, row, step, b.ctypes, c.ctypes, ldc, columns, bias.ctypes, flags)

    return call


@by_types()
def strip(x, row, to, step, rows):
    """Copy `rows` rows of one vector's width in compiled loops; bfloat16 interleaves two rows."""
    pairs = x.dtype == types.uint16
    routine = _MOVES["zip" if pairs else "copy"]
    at_once = 2 if pairs else 1

    def call(x, row, to, step, rows):
        routine(x.ctypes, row, to.ctypes, step, rows // at_once)

    return call


@by_types()
def rearranged_rows(strips, count, k):
    """Reorder packed bfloat16 rows if tiles require it. Return the row stride in bytes."""
    routine, row, at_once = _ROWS, _ROW, PACKED_K
    if routine is None or strips.dtype != types.uint16:
        return lambda strips, count, k: 4

    def call(strips, count, k):
        for strip in range(count):
            routine(strips[strip].ctypes, (k + at_once - 1) // at_once)
        return row

    return call


@by_types()
def pairs_in_rows(pairs, to, k):
    """If tiles require bfloat16 by rows, reorder a tile's pairs of k to `to` (rows, k).

    Return whether it did.
    """
    at_once, lanes = PACKED_K, shape().lanes
    squares = shape().rows // lanes
    if _ROWS is None or pairs.dtype != types.uint16:
        return lambda pairs, to, k: False

    def call(pairs, to, k):
        for first in range(0, k, at_once):
            of = pairs[first // 2 :].ctypes
            _TRANSPOSE(of, pairs.strides[0], to[:, first:].ctypes, to.strides[0], squares)
        return True

    return call


@inline
def transpose(x, row, to, step, count):
    """Transpose squares of 32-bit words in compiled loops; see vectors.py."""
    _TRANSPOSE(x.ctypes, row, to.ctypes, step, count)


@inline
def words(x, to, count):
    """Copy `count` vectors of contiguous memory in compiled loops."""
    _COPY(x.ctypes, WORDS_BYTES, to.ctypes, WORDS_BYTES, count)


@inline
def prefetch(x, row, count):
    """Prefetch the first cache line of each of `count` rows, `row` bytes apart."""
    _PREFETCH(x.ctypes, row, x.ctypes, 0, count)

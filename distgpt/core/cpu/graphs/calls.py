"""Arguments and calls of compiled loops as words of memory, so that compiled code can repeat them.

A loop's machine code takes an array as seven or more numbers (address, shape, strides, ...). They are stored
once, in a 64-bit word each. A caller, one for each sequence of types, loads them and calls the same machine
code that Python would call, so results are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.datamodel import DataModelManager
from numba.core.dispatcher import Dispatcher
from numba.core.pythonapi import _UnboxContext
from numba.core.registry import cpu_target
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from distgpt.core.cpu.compiling.barrier import Member
from distgpt.core.cpu.compiling.jit import Loop
from distgpt.core.cpu.graphs.loops import END, WIDTH, WORD, loaded
from distgpt.core.ops.api import Array

_I64, _I32 = ir.IntType(64), ir.IntType(32)


class NotRecordable(Exception):
    """Raised if work is more than calls of loops on arrays at fixed addresses."""


class Calls:
    """Calls of one thread, in order. `add` records a call, and `program` returns them for `replay`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int]] = []  # (caller or marker, function, index of its first word)
        self._words: list[int] = []
        self.loops: list[tuple[int, Loop]] = []  # (row, loop)
        self._kept: list[object] = []  # keeps the arrays alive: the words contain their addresses
        self.addresses: list[int] = []  # addresses of the arrays, except team counters
        self.counters: list[Array] = []  # counters of teams, which synchronize inside a loop
        self._arguments: Array | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, loop: Loop, arguments: Sequence[object]) -> None:
        kinds = tuple(map(typeof, arguments))
        self.loops.append((len(self._rows), loop))
        self._rows.append((caller(kinds), machine_code(loop, kinds), len(self._words)))
        for kind, value in zip(kinds, arguments, strict=True):
            flatten(kind, value, self._words)
        self._kept.append(arguments)
        self.addresses += _addresses_of(arguments)
        self.counters += (each.counter for each in arguments if isinstance(each, Member) and not each.number)

    def mark(self, what: int) -> None:
        """Record a row that is not a call."""
        self._rows.append((what, 0, 0))

    def program(self) -> Array:
        """Return the rows with addresses instead of indices. Call this only once."""
        self.mark(END)
        self._arguments = np.array(self._words, np.uint64)
        base = self._arguments.ctypes.data
        rows = [(what, function, base + WORD * first) for what, function, first in self._rows]
        program = np.array(rows, np.int64).reshape(-1, WIDTH)
        self._rows.clear()  # Python's numbers take four times the memory
        self._words.clear()
        return program


def _addresses_of(values: Sequence[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value.__array_interface__["data"][0]
        elif isinstance(value, tuple) and not isinstance(value, Member):
            yield from _addresses_of(value)


@cache
def machine_code(loop: Loop, kinds: tuple[types.Type, ...]) -> int:
    """Return the address of a loop's code for these types; compile or load it if needed."""
    assert isinstance(loop, Dispatcher)
    loop.compile(kinds)
    compiled = loop.overloads[kinds]
    if compiled.signature.return_type != types.none:
        raise NotRecordable(f"{loop} returns a value, which would be ignored")
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def flatten(kind: types.Type, value: Any, words: list[int]) -> None:
    """Append the numbers that machine code takes for a value, in Numba's calling convention."""
    if isinstance(kind, types.Array):
        # Two owner fields, unused by loops (`_nrt` is off), then the fields that they use
        words += (0, 0, value.size, value.itemsize, value.__array_interface__["data"][0])
        words += value.shape
        words += (stride % (1 << 64) for stride in value.strides)  # may be negative
    elif isinstance(kind, types.BaseTuple):
        for each, part in zip(kind, value, strict=True):
            flatten(each, part, words)
    elif isinstance(kind, types.Float):
        size = kind.bitwidth // 8
        words.append(int(np.array(value, f"<f{size}").view(f"<u{size}")))
    elif isinstance(kind, types.Integer | types.Boolean):
        words.append(int(value) % (1 << 64))
    elif isinstance(kind, PackedArgsType):
        words.append(value.address)
    elif kind == types.none:
        words.append(0)
    else:
        raise NotRecordable(f"arguments of type {kind} cannot be recorded")


def caller(kinds: tuple[types.Type, ...]) -> int:
    """Return the address of code that calls a function with arguments of these types.

    The code takes the addresses of the function and of the words, and returns the function's status.
    """
    context = cpu_target.target_context
    convention = context.call_conv.get_function_type(types.none, kinds)
    leaves = convention.args[2:]
    key = " ".join(map(str, leaves))
    if key not in _callers:
        codegen = context.codegen()
        assert isinstance(codegen, JITCPUCodegen)
        library = codegen.create_library("callers")
        module = library.create_ir_module("caller")
        name = f"distgpt_caller_{len(_callers)}"
        function = ir.Function(module, ir.FunctionType(_I32, [_I64, _I64]), name)
        builder = ir.IRBuilder(function.append_basic_block())
        result = builder.alloca(convention.args[0].pointee)
        error = builder.alloca(convention.args[1].pointee)
        values = [loaded(builder, function.args[1], i, leaf) for i, leaf in enumerate(leaves)]
        target = builder.inttoptr(function.args[0], convention.as_pointer())
        builder.ret(builder.call(target, [result, error, *values]))
        library.add_ir_module(module)
        with global_compiler_lock:
            library.finalize()
        _libraries.append(library)
        _callers[key] = library.get_pointer_to_function(name)
    return _callers[key]


_callers: dict[str, int] = {}  # keyed by argument types in LLVM syntax
_libraries: list[object] = []  # keeps the callers' code alive


class PackedArgs:
    """Packed arguments of a compiled loop, read only once for many calls.

    Unpacking an array and checking its type takes 0.2 µs per call. For dozens of arrays this is half the time
    of a token of a small model.

        packed = PackedArgs((weights, cache))
        call = entry(loop, 0, packed)  # machine code for arguments of these types
        call(7, packed)  # inside the loop: weights, cache = unpack_args(packed)
    """

    def __init__(self, values: tuple[object, ...]) -> None:
        self._values = values  # keeps the arrays alive
        self.kind = typeof(values)
        words: list[int] = []
        flatten(self.kind, values, words)
        self._words = np.array(words, np.uint64)
        self.address = self._words.ctypes.data


class PackedArgsType(types.Type):  # type: ignore[misc]
    """Numba's type of PackedArgs: the address of the words of a value of type `kind`."""

    def __init__(self, kind: types.Type) -> None:
        self.kind = kind
        super().__init__(f"PackedArgs({kind})")


@register_model(PackedArgsType)
class _PackedArgsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: DataModelManager, type: types.Type) -> None:
        super().__init__(manager, type, _I64)


@typeof_impl.register(PackedArgs)  # type: ignore[untyped-decorator]
def _typeof_packed(value: PackedArgs, context: object) -> PackedArgsType:
    return PackedArgsType(value.kind)


@unbox(PackedArgsType)  # type: ignore[untyped-decorator]
def _unbox_packed(type: PackedArgsType, value: ir.Value, context: _UnboxContext) -> NativeValue:
    address = context.pyapi.object_getattr_string(value, "address")
    number = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    return NativeValue(number, is_error=context.pyapi.c_api_error())

"""Pack arguments of a compiled loop that stay the same over many calls, so that they are read only once.

To unpack an array and to look at its type costs 0.2 µs in every call: dozens of them are half a token of a
small model.

    packed = PackedArgs((weights, cache))
    call = entry(loop, 0, packed)  # machine code for arguments of these types
    call(7, packed)  # inside the loop: weights, cache = unpack_args(packed)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import datamodel
from numba.core.registry import cpu_target
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox

from distgpt.kernels.fused.jit import jit

_ir: Any = ir
_models: Any = models
_typeof: Any = typeof
_NativeValue: Any = NativeValue


class PackedArgs:
    """Tuples, numbers and arrays as compiled loops have them in memory."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values  # keeps the arrays alive
        self.kind = _typeof(values)
        self._memory = np.zeros(_size(self.kind), np.uint8)
        self.address = self._memory.ctypes.data
        _store(values, self._memory)


def entry(loop: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a loop's machine code for arguments of these types, which it does not check again."""
    found: Callable[..., Any] = loop.compile(tuple(map(_typeof, arguments)))
    return found


class PackedArgsType(types.Type):
    """Numba's type of PackedArgs: an address of values of type `kind`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        super().__init__(f"PackedArgs({kind})")


@register_model(PackedArgsType)
class _PackedArgsModel(_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type: Any) -> None:
        super().__init__(manager, type, _ir.IntType(64))


@typeof_impl.register(PackedArgs)
def _typeof_packed(value: PackedArgs, context: Any) -> Any:
    return PackedArgsType(value.kind)


@unbox(PackedArgsType)  # type: ignore[untyped-decorator]
def _unbox_packed(type: Any, value: Any, context: Any) -> Any:
    address = context.pyapi.object_getattr_string(value, "address")
    number = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    return _NativeValue(number, is_error=context.pyapi.c_api_error())


@intrinsic
def unpack_args(context, packed=None):
    """Return the values, inside compiled loops."""

    def generate(context, builder, signature, values):
        pointer = context.get_value_type(signature.return_type).as_pointer()
        return builder.load(builder.inttoptr(values[0], pointer))

    return packed.kind(packed), generate


@intrinsic
def _stored(context, values=None, memory=None):
    def generate(context, builder, signature, given):
        array = context.make_array(signature.args[1])(context, builder, given[1])
        builder.store(given[0], builder.bitcast(array.data, given[0].type.as_pointer()))
        return context.get_dummy_value()

    return types.none(values, memory), generate


@jit
def _store(values, memory):
    _stored(values, memory)


def _size(kind: Any) -> int:
    """Return the bytes of a value of this type."""
    context: Any = cpu_target.target_context
    model: Any = datamodel
    return int(context.get_abi_sizeof(model.default_manager.lookup(kind).get_value_type()))

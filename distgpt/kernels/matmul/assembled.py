"""Microkernels as machine code: assembled once for a processor, kept on disk, called by compiled loops."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types
from numba.extending import overload

from distgpt.files import made_once
from distgpt.kernels.fused import kept
from distgpt.kernels.matmul.microkernel import (
    AVX2,
    AVX512,
    AVX512_BF16,
    BFLOAT16,
    FLOAT32,
    Shape,
    module,
)

_config: Any = numba.config
_binding: Any = llvm
_engines: list[Any] = []  # the code lives as long as these


@cache
def processor() -> tuple[str, str]:
    """Name and features as LLVM gives them, or as NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
    name = _config.CPU_NAME or _binding.get_host_cpu_name()
    features = _config.CPU_FEATURES
    return name, _binding.get_host_cpu_features().flatten() if features is None else features


@cache
def shape() -> Shape:
    """How this processor's registers are used. Where LLVM knows no AVX it splits the vectors itself."""
    present = {feature[1:] for feature in processor()[1].split(",") if feature.startswith("+")}
    if "avx512f" not in present:
        return AVX2
    return AVX512_BF16 if "avx512bf16" in present else AVX512


def machine_code(factor: str, out: str) -> bytes:
    """The object file with `tile` for these types, from the disk where it is kept."""
    key = repr((factor, out, shape(), processor(), llvmlite.__version__)).encode()
    folder = kept.folder()
    path = folder and folder / f"tile-{factor}-{out}-{sha256(key).hexdigest()[:16]}.o"
    return made_once(path, lambda: bytes(_machine().emit_object(_verified(module(shape(), factor, out)))))


def _machine() -> Any:
    _binding.initialize_native_target()
    _binding.initialize_native_asmprinter()
    name, features = processor()
    return _binding.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=3)


def _verified(text: str) -> Any:
    parsed = _binding.parse_assembly(text)
    parsed.verify()
    return parsed


@cache
def _external(factor: str, out: str) -> Any:
    """`tile` under a name that compiled loops call it by."""
    engine = _binding.create_mcjit_compiler(_binding.parse_assembly(""), _machine())
    engine.add_object_file(_binding.ObjectFileRef.from_data(machine_code(factor, out)))
    engine.finalize_object()
    _engines.append(engine)
    symbol = f"distgpt_tile_{factor}_{out}"
    _binding.add_symbol(symbol, engine.get_function_address("tile"))
    i, p = types.int64, types.voidptr
    return types.ExternalFunction(symbol, types.void(i, i, p, i, i, p, p, i, i, p, i))


_NAMES = {types.float32: FLOAT32, types.uint16: BFLOAT16}
# Registered when this file is imported: loops that were loaded from the disk call them by name.
_TILES = {pair: _external(*pair) for pair in ((FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16))}


def tile(
    rows: Any,
    k: Any,
    a: Any,
    row: Any,
    step: Any,
    b: Any,
    c: Any,
    ldc: Any,
    columns: Any,
    bias: Any,
    flags: Any,
) -> None:
    """Compute a tile of C inside compiled loops; see microkernel.py. Bfloat16 arrays are of type uint16.

    `bias` is any array where the flags do not ask for one.
    """
    raise NotImplementedError


@overload(tile)
def _tile(
    rows: Any,
    k: Any,
    a: Any,
    row: Any,
    step: Any,
    b: Any,
    c: Any,
    ldc: Any,
    columns: Any,
    bias: Any,
    flags: Any,
) -> Any:
    routine = _TILES[_NAMES[a.dtype], _NAMES[c.dtype]]

    def call(
        rows: Any,
        k: Any,
        a: Any,
        row: Any,
        step: Any,
        b: Any,
        c: Any,
        ldc: Any,
        columns: Any,
        bias: Any,
        flags: Any,
    ) -> None:
        routine(rows, k, a.ctypes, row, step, b.ctypes, c.ctypes, ldc, columns, bias.ctypes, flags)

    return call

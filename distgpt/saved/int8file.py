"""Weights files in int8: what they hold, and how they are written and read.

A matrix is stored as int8 (I8) under its name, and its scales as bfloat16 under its name and ".scales": one
for each block of columns of a row. All else is float32. The metadata say so, with the size of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig
from distgpt.errors import DataError
from distgpt.formatting import size
from distgpt.kernels.api import Array
from distgpt.kernels.low_precision import MOST, Quantised, quantise, restored
from distgpt.kernels.matmul.int8 import BLOCK
from distgpt.model.memory import Spec, is_quantised
from distgpt.model.model import Architecture
from distgpt.saved.tensors import (
    DATA_SUM,
    HEADER_SUM,
    Header,
    Kind,
    read_header,
    read_rows,
    refuse_misfits,
    verify_data,
    write_made,
)

if TYPE_CHECKING:  # with compiled loops, which files are read and written without
    from distgpt.kernels.cpu_int8 import Int8Kernels
    from distgpt.model.packed import Int8Model


VERSION = "3"  # of the weights format, for files in int8 alone
QUANTISED, SCALES = "quantised", ".scales"  # in the metadata; behind a matrix's name
WORDS = f"int8, blocks of {BLOCK}"


def is_int8(metadata: Mapping[str, str]) -> bool:
    """Whether this is the metadata of a file in int8: its version says so, nothing else."""
    return metadata["format_version"] == VERSION


def scales_shape(spec: Spec) -> tuple[int, int]:
    return spec.shape[0], -(-spec.shape[1] // BLOCK)


def tensors_of(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every tensor."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in Architecture(config).layout.specs:
        found[spec.name] = ("I8" if is_quantised(spec) else "F32", spec.shape)
        if is_quantised(spec):
            found[spec.name + SCALES] = ("BF16", scales_shape(spec))
    return found


def refuse_others(header: Header, config: ModelConfig, path: Path) -> None:
    """A DataError unless the file is one in int8 that we can read, of this model."""
    if header.metadata.get(QUANTISED) != WORDS:
        raise DataError(f"{path} is quantised in a way that this distgpt does not read: it reads {WORDS}")
    known = tensors_of(config)
    refuse_misfits(header, {name: shape for name, (_, shape) in known.items()}, path, integers=True)
    for name, (dtype, _) in known.items():
        if (found := header.tensors[name].dtype) != dtype:
            raise DataError(f"{path}: {name} is {found}, not {dtype}")


def read_parameter(path: Path, header: Header, spec: Spec) -> Any:
    """A parameter in the form of an Int8Model: a matrix is rounded unless the file has it in int8."""
    if not is_quantised(spec):
        return _finite(_read(path, header, spec.name, spec.shape, np.float32), path)
    if not is_int8(header.metadata):
        return quantise(_finite(_read(path, header, spec.name, spec.shape, np.float32), path))
    scales = _read(path, header, spec.name + SCALES, scales_shape(spec), np.float32)
    if not (scales >= 0).all() or not (scales <= np.finfo(np.float32).max / MOST).all():
        raise DataError(f"{path}: {spec.name + SCALES} holds scales that are negative or not finite")
    bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
    return Quantised(_read(path, header, spec.name, spec.shape, np.int8), bits)


def fill_from_int8(path: Path, host: Mapping[str, Array], config: ModelConfig) -> None:
    """Arrays of float ← the parameters that a file in int8 stands for."""
    header = read_header(path)
    verify_data(path, header)
    for spec in Architecture(config).layout.specs:
        found = read_parameter(path, header, spec)
        host[spec.name][...] = restored(found) if isinstance(found, Quantised) else found


def load_int8(path: Path, config: ModelConfig, kernels: Int8Kernels, comm: Comm) -> Int8Model:
    """Rank 0 reads parameter after parameter, and all ranks get them. Collective."""
    from distgpt.model.packed import Int8Model

    headers: list[Header] = []
    on_root(comm, lambda: headers.append(_verified(path)))
    params: dict[str, Any] = {}
    for spec in Architecture(config).layout.specs:
        found: Any = np.empty(spec.shape, np.float32)
        if is_quantised(spec):
            found = Quantised(np.empty(spec.shape, np.int8), np.empty(scales_shape(spec), np.uint16))
        on_root(comm, partial(_take, found, path, headers, spec))
        for array in found if isinstance(found, Quantised) else (found,):
            comm.broadcast(array.reshape(-1))
        params[spec.name] = found
    return Int8Model(config, kernels, params)


def write_int8(path: Path, config: ModelConfig, out: Path) -> str:
    """Write what is in a file of float as one in int8. Return what was done, for people."""
    header = _verified(path)
    if is_int8(header.metadata):
        raise DataError(f"{path} is in int8 already")
    specs = {spec.name: spec for spec in Architecture(config).layout.specs}
    types = {"I8": np.int8, "BF16": np.uint16, "F32": np.float32}
    kinds: dict[str, Kind] = {
        name: (np.dtype(types[dtype]), shape) for name, (dtype, shape) in tensors_of(config).items()
    }

    def make(name: str) -> Array:
        found = read_parameter(path, header, specs[name.removesuffix(SCALES)])
        if not isinstance(found, Quantised):
            return found
        return found.scales if name.endswith(SCALES) else found.q

    kept = {name: text for name, text in header.metadata.items() if name not in (DATA_SUM, HEADER_SUM)}
    write_made(out, kinds, make, {**kept, "format_version": VERSION, QUANTISED: WORDS})
    before, after = (size(file.stat().st_size) for file in (path, out))
    return f"{out}: {WORDS}; {before} became {after}"


def _verified(path: Path) -> Header:
    header = read_header(path)
    verify_data(path, header)
    return header


def _take(to: Any, path: Path, headers: list[Header], spec: Spec) -> None:
    found = read_parameter(path, headers[0], spec)
    pairs = zip(to, found, strict=True) if isinstance(to, Quantised) else [(to, found)]
    for array, values in pairs:
        array[...] = values


def _read(path: Path, header: Header, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.empty(shape, dtype)
    read_rows(path, header, name, array)
    return array


def _finite(array: Array, path: Path) -> Array:
    if not np.isfinite(array).all():
        raise DataError(f"{path} holds weights that are not finite")
    return array

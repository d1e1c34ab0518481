"""Weights files in int8 and int4: matrices as integers and scales, other parameters as float32.

An int8 matrix is stored as I8 under its name. An int4 matrix is stored as U8 with half as many columns: two
indices of `LEVELS` per byte, the first in the lower half. Scales are BF16 under the name plus ".scales", one
for each block of columns of a row. The metadata include the block size. In int4 files, embedding, head and
value embeddings are int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.model.memory import Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import ROUNDED_VERSION, read_description
from distgpt.core.saved.tensors import (
    DATA_SUM,
    Header,
    LazyTensors,
    read_rows,
    refuse_misfits,
    write_tensors,
)
from distgpt.core.saved.weights import (
    QUANTISED,
    SOURCE_SUM,
    Merge,
    find_weights,
    read_float,
    rounded_dtype,
    verified,
)
from distgpt.inference.quantized.integers import (
    BLOCKS,
    MOST,
    Quantised,
    from_nibbles,
    restored,
    to_nibbles,
)
from distgpt.models.quantized.bits import bits_of

if TYPE_CHECKING:  # imports compiled loops, which reading and writing files does not need
    from distgpt.inference.quantized.kernels import Int8Kernels

SCALES = ".scales"  # suffix of a matrix's name
WORDS = {f"int{bits}": f"int{bits}, blocks of {block}" for bits, block in BLOCKS.items()}


def tensors_of(config: ModelConfig, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor."""
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in Architecture(config).layout.specs:
        bits, shape = bits_of(spec, dtype), spec.shape
        halves = (shape[0], -(-shape[-1] // 2))
        result[spec.name] = {0: ("F32", shape), 8: ("I8", shape), 4: ("U8", halves)}[bits]
        if bits:
            result[spec.name + SCALES] = ("BF16", _scales_shape(spec, bits))
    return result


_STORED = {"U8": np.uint8, "I8": np.int8, "BF16": np.uint16, "F32": np.float32}


def _scales_shape(spec: Spec, bits: int) -> tuple[int, int]:
    return spec.shape[0], -(-spec.shape[1] // BLOCKS[bits])


def read_parameter(
    path: Path, header: Header, spec: Spec, bits: int, threads: int = 1, merge: Merge | None = None
) -> Any:
    """Return a parameter in 8 or 4 bits, rounded if needed; 0 bits return it as stored."""
    own = bits_of(spec, rounded_dtype(header.metadata, path)) if QUANTISED in header.metadata else 0
    if merge or not own:
        floats = np.empty(spec.shape, np.float32)
        read_float(path, header, spec, floats)
        if merge:
            merge(spec.name, floats)
        return _rounded(floats, bits, threads) if bits else floats
    scales = _read(path, header, spec.name + SCALES, _scales_shape(spec, own), np.float32)
    sizes = np.abs(scales) if own == 4 else scales
    if not (sizes >= 0).all() or not (sizes <= np.finfo(np.float32).max / MOST).all():
        what = "not finite" if own == 4 else "negative or not finite"
        raise DataError(f"{path}: {spec.name + SCALES} has scales that are {what}")
    if own == 4:
        halves = _read(path, header, spec.name, (len(scales), -(-spec.shape[1] // 2)), np.uint8)
        q = from_nibbles(halves, spec.shape[1])
    else:
        q = _read(path, header, spec.name, spec.shape, np.int8)
    result = Quantised(q, (scales.view(np.uint32) >> 16).astype(np.uint16), own)
    if bits in (0, own):
        return result
    return _rounded(restored(result), bits, threads)


def _rounded(w: Array, bits: int, threads: int) -> Quantised:
    from distgpt.inference.quantized.rounding import rounded

    return rounded(w, bits, threads)


def _read(path: Path, header: Header, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.empty(shape, dtype)
    read_rows(path, header, name, array)
    return array


def _parameters(
    path: Path, config: ModelConfig, kernels: Int8Kernels, comm: Comm, merge: Merge | None
) -> LazyTensors:
    """Return a mapping that reads parameters on rank 0 on access, so that few are in memory.

    Each access is collective.
    """
    specs = {spec.name: spec for spec in Architecture(config).layout.specs}
    header = on_root(comm, lambda: verified(path))

    def read(name: str) -> Any:
        spec, threads = specs[name], kernels.threads
        bits = bits_of(spec, kernels.rounded)
        return on_root(comm, lambda: read_parameter(path, header, spec, bits, threads, merge))

    return LazyTensors({name: (np.dtype(np.float32), spec.shape) for name, spec in specs.items()}, read)


def quantize(path: Path, out: Path, dtype: str = "int8", done: Mapping[str, Quantised] | None = None) -> str:
    """Quantize a weights file to int8 or int4; `done` has already rounded matrices. Return a summary."""
    path = find_weights(path)
    description, header = read_description(path), verified(path)
    description.reject_incomplete(path)
    if description.rounded:
        raise DataError(f"{path} is already in {description.rounded}")
    config, ready = description.run.model, done or {}
    specs = {spec.name: spec for spec in Architecture(config).layout.specs}
    kinds = {
        name: (np.dtype(_STORED[kind]), shape) for name, (kind, shape) in tensors_of(config, dtype).items()
    }

    def make(name: str) -> Array:
        spec = specs[name.removesuffix(SCALES)]
        result: Array | Quantised = ready.get(spec.name) or read_parameter(
            path, header, spec, bits_of(spec, dtype), granted_cores().whole
        )
        if not isinstance(result, Quantised):
            return result
        if name.endswith(SCALES):
            return result.scales
        return to_nibbles(result.q) if result.bits == 4 else result.q

    kept = header.facts()
    if DATA_SUM in header.metadata:
        kept[SOURCE_SUM] = header.metadata[DATA_SUM]
    known = {**kept, "format_version": ROUNDED_VERSION, QUANTISED: WORDS[dtype]}
    write_tensors(out, LazyTensors(kinds, make), known)
    before, after = (size(file.stat().st_size) for file in (path, out))
    return f"{out}: {WORDS[dtype]}; {before} became {after}"


class Rounded:
    """The `QuantizedFormat` of int8 or int4."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.stored = dtype, WORDS[dtype]

    def reject_training(self, t: TrainConfig) -> None:
        raise UsageError(
            f"{t.init} is in {self.dtype}, which cannot be trained further; use the original file,"
            " or train adapters for it (--lora-rank)"
        )

    def refuse_others(self, header: Header, config: ModelConfig, path: Path) -> None:
        known = tensors_of(config, self.dtype)
        refuse_misfits(header, {name: shape for name, (_, shape) in known.items()}, path, integers=True)
        for name, (stored, _) in known.items():
            if (result := header.tensors[name].dtype) != stored:
                raise DataError(f"{path}: {name} must be {stored}, not {result}")

    def read(self, path: Path, header: Header, spec: Spec, array: Array) -> None:
        if bits_of(spec, self.dtype):
            array[...] = restored(read_parameter(path, header, spec, 0))
        else:
            read_rows(path, header, spec.name, array)

    def load(
        self, path: Path, config: ModelConfig, kernels: Kernels, comm: Comm, merge: Merge | None
    ) -> Model:
        """Read parameters on rank 0 as they are packed, and broadcast them."""
        from distgpt.inference.quantized.kernels import Int8Kernels
        from distgpt.models.quantized.packed import Int8Model

        assert isinstance(kernels, Int8Kernels)
        return Int8Model(config, kernels, _parameters(path, config, kernels, comm, merge))

    def of(self, model: Model) -> Model:
        from distgpt.core.cpu.kernels import CpuKernels
        from distgpt.inference.quantized.kernels import Int8Kernels
        from distgpt.models.quantized.packed import int8_of

        assert isinstance(model.kernels, CpuKernels)
        return int8_of(model, Int8Kernels(model.kernels.threads, self.dtype))


INT8, INT4 = Rounded("int8"), Rounded("int4")

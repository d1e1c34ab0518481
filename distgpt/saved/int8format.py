"""What a weights file in int8 holds.

A matrix is stored as int8 (I8) under its name, and its scales as bfloat16 under its name and ".scales": one
for each block of columns of a row. All else is float32. The metadata say so, with the size of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distgpt.config import ModelConfig
from distgpt.errors import DataError
from distgpt.kernels.matmul.int8 import BLOCK
from distgpt.model.memory import Spec, is_quantised
from distgpt.model.model import Architecture
from distgpt.saved.tensors import Header, refuse_misfits

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

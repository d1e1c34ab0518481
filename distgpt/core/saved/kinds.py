"""Kinds of weights files beside that of a whole model in floats: rows of two tables, and what they answer.

In a rounded file matrices are integers with scales, for inference alone. A part is a file whose tensors stand
beside those of another file, its base. The core has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.base.tables import Table
from distgpt.core.comm.api import Comm
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array, Kernels
from distgpt.core.saved.tensors import Header, read_header, read_rows, verify_data

# Keys in the metadata of a rounded file: how it is rounded, and the checksum of the data that were rounded.
QUANTISED, SOURCE_SUM = "quantised", "source_sha256"


class Merge(Protocol):
    """Adds to the matrices of a model as they are read; on rank 0, but for the tokenizer."""

    tokenizer: Tokenizer | None  # in place of the model's, if there is one

    def __call__(self, name: str, array: Array) -> None: ...


class RoundedKind(Protocol):
    """A dtype that weights are rounded to."""

    stored: str  # what the metadata of such a file say

    def refuse_training(self, t: TrainConfig) -> None:
        """Refuse to train the weights of `t.init`."""

    def refuse_others(self, header: Header, config: ModelConfig, path: Path) -> None:
        """Raise a DataError unless the file has the tensors of this model in this dtype."""

    def read(self, path: Path, header: Header, spec: Spec, array: Array) -> None:
        """Fill an array of floats with a parameter, or with its first rows."""

    def load(
        self, path: Path, config: ModelConfig, kernels: Kernels, comm: Comm, merge: Merge | None
    ) -> Model:
        """Return the model in this dtype, of a file in any. Collective."""

    def of(self, model: Model) -> Model:
        """Return a model of floats in this dtype."""


class PartKind(Protocol):
    """A kind of part; its name is the format of its files."""

    def layout(self, run: RunConfig) -> Layout:
        """Return the layout of the tensors in the file."""

    def refuse_damaged(self, run: RunConfig, path: Path) -> None:
        """Raise a DataError where the run's settings have no such part."""

    def refuse_alone(self, path: Path | str) -> None:
        """Refuse to take it for a whole model."""

    def whole(self, path: Path, comm: Comm) -> tuple[Path, Merge]:
        """Return the file of the base, and what adds this part to it. Collective."""


ROUNDED: Table[RoundedKind] = Table("rounded", "dtype", {})
PARTS: Table[PartKind] = Table("part files", "weights file of format", {})


def rounded_dtype(metadata: Mapping[str, str], path: Path) -> str:
    """Return the dtype that a rounded file is in, as its metadata say."""
    known = []
    for dtype, kind in ROUNDED.rows():
        if metadata.get(QUANTISED) == kind.stored:
            return dtype
        known.append(kind.stored)
    raise ROUNDED.missing() or DataError(
        f"{path} is quantised in a way that this distgpt does not read: it reads {' and '.join(known)}"
    )


def verified(path: Path) -> Header:
    """Read the header of a file whose data match their checksum."""
    header = read_header(path)
    verify_data(path, header)
    return header


def read_float(path: Path, header: Header, spec: Spec, array: Array) -> None:
    """Fill an array of floats with a parameter, or with its first rows, also from a rounded file."""
    if QUANTISED in header.metadata:
        ROUNDED[rounded_dtype(header.metadata, path)].read(path, header, spec, array)
    else:
        read_rows(path, header, spec.name, array)
    if not np.isfinite(array).all():
        raise DataError(f"{path} holds weights that are not finite")

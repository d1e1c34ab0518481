"""Weights files: which one a name means, and the kinds beside that of a whole model in floats.

In a rounded file matrices are integers with scales, for inference alone. A part is a file whose tensors stand
beside those of another file, its base. The core has neither kind: see `Components`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.core.base.errors import DataError, StorageError, UsageError, command_line, nearest_path
from distgpt.core.base.files import storage_errors
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout, Spec
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.checkpoint import WEIGHTS, newest_intact
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import Header, read_header, read_rows, verify_data


def weights_of(name: Path, fetches: bool = True) -> Path:
    """Return the weights file of this name. Fetch it, or refuse to, where it is not on this machine."""
    key, _, rest = str(name).partition(":")
    fetched = components().weights(key, rest, fetches) if rest and not name.exists() else None
    return fetched or find_weights(name)


def find_weights(path: Path) -> Path:
    """Return a weights file: of a run the best, else the last, else that of its newest intact checkpoint.

    Where the path holds a model in another format, a UsageError names the command that imports it.
    """
    with storage_errors("read", path):
        if path.suffix == ".gguf" and path.is_file():
            raise UsageError(f"{path} is in GGUF: first {import_command(path, path.stem)}")
        if not path.is_dir():
            if not path.exists():
                raise StorageError(f"cannot read {path}: No such file or directory{nearest_path(path)}")
            return path
        run = RunDirectory(path)
        for file in (run.best, run.weights) if run.config.is_file() else (path / WEIGHTS,):
            if file.is_file():
                return file
        if (path / "config.json").is_file():
            raise UsageError(f"{path} holds a model of transformers: first {import_command(path)}")
    if newest := newest_intact(run.checkpoints):
        return newest[0] / WEIGHTS
    raise UsageError(f"{path} is a directory without weights")


def import_command(source: Path, name: str = "") -> str:
    """Return the command that imports a directory of transformers, or a file, to one of this name."""
    out = f"{name or source.resolve().name}.safetensors"
    return command_line("weights", "import", source, "--out", out)


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

    def describe(self, run: RunConfig) -> str:
        """Return what such a file holds, in words that the name of its base follows, "some rows beside"."""

    def refuse_alone(self, path: Path | str) -> None:
        """Refuse to take it for a whole model."""

    def whole(self, weights: Path, comm: Comm, part: Path | None = None) -> tuple[Path, Merge]:
        """Return the file of the base, and what adds the part to it. Collective.

        Without `part`: `weights` is one, and names its base.
        """


def rounded_dtype(metadata: Mapping[str, str], path: Path) -> str:
    """Return the dtype that a rounded file is in, as its metadata say."""
    known = []
    for dtype in components().quantized_dtypes:
        kind = components().quantized(dtype)
        if metadata.get(QUANTISED) == kind.stored:
            return dtype
        known.append(kind.stored)
    raise DataError(
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
        components().quantized(rounded_dtype(header.metadata, path)).read(path, header, spec, array)
    else:
        read_rows(path, header, spec.name, array)
    if not np.isfinite(array).all():
        raise DataError(f"{path} holds weights that are not finite")

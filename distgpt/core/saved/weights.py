"""Weights files: resolving a name, and kinds other than a whole float model.

A quantized file has integer matrices with scales, only for inference. A part is a file of tensors that add to
another file, its base. The core implements neither; see `Components`.
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
from distgpt.core.saved.checkpoint import WEIGHTS, latest_valid_checkpoint
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import Header, read_header, read_rows, verify_data


def weights_of(name: Path, fetches: bool = True) -> Path:
    """Return the weights file of this name. If it is not local, download it, or raise an error.

    A model in another format is imported; without `fetches`, it is rejected.
    """
    key, _, rest = str(name).partition(":")
    if rest and not name.exists():
        return components().weights(key, rest, fetches) or find_weights(name)
    return (components().imported(name) if fetches else None) or find_weights(name)


def find_weights(path: Path) -> Path:
    """Return a weights file. A run has its ensemble, its best weights, its last, or its latest checkpoint's.

    If the path has a model in another format, a UsageError gives the import command.
    """
    with storage_errors("read", path):
        if path.suffix == ".gguf" and path.is_file():
            raise UsageError(f"{path} is a GGUF file; import it first: {import_command(path, path.stem)}")
        if not path.is_dir():
            if not path.exists():
                raise StorageError(f"cannot read {path}: No such file or directory{nearest_path(path)}")
            return path
        run = RunDirectory(path)
        for file in (run.ensemble, run.best, run.weights) if run.config.is_file() else (path / WEIGHTS,):
            if file.is_file():
                return file
        if (path / "config.json").is_file():
            raise UsageError(f"{path} is a transformers model; import it first: {import_command(path)}")
    if newest := latest_valid_checkpoint(run.checkpoints):
        return newest[0] / WEIGHTS
    raise UsageError(f"{path} contains no weights")


def import_command(source: Path, name: str = "") -> str:
    """Return the command that imports a transformers directory, or a file, as NAME.safetensors."""
    out = f"{name or source.resolve().name}.safetensors"
    return command_line("weights", "import", source, "--out", out)


# Metadata keys of a quantized file: the method, and the checksum of the original data.
QUANTISED, SOURCE_SUM = "quantised", "source_sha256"


class Merge(Protocol):
    """A modification of a model's matrices as they are read. For rank 0, except the tokenizer."""

    tokenizer: Tokenizer | None  # replaces the model's tokenizer if not None

    def __call__(self, name: str, array: Array) -> None: ...


class QuantizedFormat(Protocol):
    """A quantized dtype for weights."""

    stored: str  # its value in the metadata

    def reject_training(self, t: TrainConfig) -> None:
        """Reject training the weights of `t.init`."""

    def refuse_others(self, header: Header, config: ModelConfig, path: Path) -> None:
        """Raise a DataError unless the file has the tensors of this model in this dtype."""

    def read(self, path: Path, header: Header, spec: Spec, array: Array) -> None:
        """Fill a float array with a parameter, or with its first rows."""

    def load(
        self, path: Path, config: ModelConfig, kernels: Kernels, comm: Comm, merge: Merge | None
    ) -> Model:
        """Load a file of any dtype as a model of this dtype. Collective."""

    def of(self, model: Model) -> Model:
        """Convert a float model to this dtype."""


class PartKind(Protocol):
    """A kind of part, named by the format of its files."""

    def layout(self, run: RunConfig) -> Layout:
        """Return the layout of the tensors in the file."""

    def refuse_damaged(self, run: RunConfig, path: Path) -> None:
        """Raise a DataError if the run's settings have no such part."""

    def describe(self, run: RunConfig) -> str:
        """Describe the file's content in a phrase that precedes the name of its base."""

    def refuse_alone(self, path: Path | str) -> None:
        """Raise an error if the part is used as a whole model."""

    def whole(self, weights: Path, comm: Comm, part: Path | None = None) -> tuple[Path, Merge]:
        """Return the base file, and a merge that adds the part. Collective.

        Without `part`, `weights` is the part and names its base.
        """


def rounded_dtype(metadata: Mapping[str, str], path: Path) -> str:
    """Return the dtype of a quantized file from its metadata."""
    known = []
    for dtype in components().quantized_dtypes:
        kind = components().quantized(dtype)
        if metadata.get(QUANTISED) == kind.stored:
            return dtype
        known.append(kind.stored)
    raise DataError(f"{path} has an unsupported quantization; this distgpt reads {' and '.join(known)}")


def verified(path: Path) -> Header:
    """Read the header of a file and verify its data."""
    header = read_header(path)
    verify_data(path, header)
    return header


def read_float(path: Path, header: Header, spec: Spec, array: Array) -> None:
    """Fill a float array with a parameter, or its first rows, from a float or quantized file."""
    if QUANTISED in header.metadata:
        components().quantized(rounded_dtype(header.metadata, path)).read(path, header, spec, array)
    else:
        read_rows(path, header, spec.name, array)
    if not np.isfinite(array).all():
        raise DataError(f"{path} has weights that are not finite")

"""A model as one self-describing file of weights, configuration and tokenizer.

For other kinds of weights files, see weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from distgpt.core.base.checked import checked, parse_json
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import collective_error, on_root, raise_if_any
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_memory
from distgpt.core.components import EXTENDED, components
from distgpt.core.config import AUTO_DTYPE, QUANTIZED_DTYPES, ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.core.config.run_config import MODEL, REMOVED
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import Tokenizer, tokenizer_from_json
from distgpt.core.model.memory import LEARNED, FlatBuffer, Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.tensors import (
    DATA_SUM,
    HEADER_SUM,
    Header,
    Tensors,
    read_header,
    read_into,
    refuse_misfits,
    write_tensors,
)
from distgpt.core.saved.weights import (
    QUANTISED,
    Merge,
    find_weights,
    import_command,
    read_float,
    rounded_dtype,
    verified,
    weights_of,
)

FORMAT = "distgpt-weights"
FORMAT_VERSION = "2"
ROUNDED_VERSION = "3"  # older programs must reject quantized files
# The checksums that a file must have, by format version.
READ = {"1": (), "2": (DATA_SUM, HEADER_SUM), ROUNDED_VERSION: (DATA_SUM, HEADER_SUM)}
ORIGIN = "origin"  # metadata key of an imported model's source
BASE = "base"  # metadata key of a part's base file


@dataclass(frozen=True, slots=True)
class Base:
    """Path and data checksum of the weights file that a part belongs to."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Description:
    """The configuration and tokenizer in a weights file. A model built in Python has no tokenizer."""

    run: RunConfig
    tokenizer: Tokenizer | None
    rounded: str = ""  # the matrices' quantized dtype, one of Components.quantized_dtypes
    part: str = ""  # the kind of part, one of Components.parts; the file has only its tensors
    base: Base | None = None  # the base of a part
    untrainable: str = ""  # why the training settings are invalid; "" if they are valid

    def reject_incomplete(self, path: Path | str) -> None:
        """Reject a file without a whole model."""
        if self.part:
            components().part(self.part).refuse_alone(path)

    @property
    def layout(self) -> Layout:
        if self.part:
            return components().part(self.part).layout(self.run)
        return Architecture(self.run.model).layout

    def refuse_unreadable(self, trained: Layout) -> None:
        """Raise a UsageError if a file with this description could not be read with the `trained` tensors."""
        if self.layout.specs != trained.specs:
            what = f"of format {self.part!r}" if self.part else "without a part"
            raise UsageError(f"a weights file {what} does not contain the tensors to train")

    def reject_training(self, t: TrainConfig) -> None:
        """Reject training the weights of a quantized file."""
        if self.rounded:
            components().quantized(self.rounded).reject_training(t)

    def to_metadata(self) -> dict[str, str]:
        tokenizer = self.tokenizer.to_json() if self.tokenizer else ""
        version = {"format": self.part or FORMAT, "format_version": FORMAT_VERSION}
        base = {BASE: json.dumps(asdict(self.base))} if self.base else {}
        return {**version, **base, "config": self.run.to_toml(), "tokenizer": tokenizer}


def save_model(path: Path, model: Model, description: Description) -> str:
    """Write the file and return the checksum of its header."""
    return write_tensors(path, on_host(model, model.weights), description.to_metadata())


def _refuse_too_large(path: Path, config: ModelConfig, kernels: Kernels, comm: Comm) -> None:
    """Reject weights that exceed the available memory, before the system kills the process. Collective."""
    if kernels.capabilities.is_async:  # a GPU raises its own error
        return
    need = Architecture(config).layout.size * kernels.dtype.itemsize
    granted = granted_memory(comm.local_size)
    free = f"{size(need)} on {granted.where}, which has {size(granted.free)} free"
    hint = f"try another --dtype: bfloat16, {' and '.join(QUANTIZED_DTYPES)} take less"
    raise_if_any(comm, f"{path} requires {free}; {hint}" if need > granted.free else "")


def load_model(
    path: Path, kernels: Kernels, comm: Comm, context: int | None = None, merge: Merge | None = None
) -> tuple[Model, Description]:
    """Read and check a model on rank 0 before allocating memory, then broadcast it. Collective.

    `path` may also be a run's directory or a checkpoint. A model without learned positions accepts a
    `context` other than its training context.
    """
    path = on_root(comm, lambda: find_weights(path))
    description = load_description(path, comm)
    on_root(comm, lambda: description.reject_incomplete(path))
    if merge:
        description = replace(description, tokenizer=merge.tokenizer or description.tokenizer)
    config = description.run.model
    if context is not None and context != config.seq_len:
        if config.has_position_vectors:
            raise collective_error(
                UsageError(
                    f"{path} has learned positions, so its context must be {config.seq_len}, not {context}"
                )
            )
        try:
            config = replace(config, seq_len=context)
        except UsageError as error:
            raise collective_error(error) from None
    if dtype := kernels.capabilities.rounded:
        return components().quantized(dtype).load(path, config, kernels, comm, merge), description
    _refuse_too_large(path, config, kernels, comm)
    model = Model(Architecture(config), kernels)

    def read(host: Tensors) -> None:
        if description.rounded:
            header = verified(path)
            for spec in model.architecture.layout.specs:
                read_float(path, header, spec, host[spec.name])
        else:
            read_into(path, host)
        if merge:
            for name, array in host.items():
                merge(name, array)

    fill(comm, model, {"": model.weights}, read)
    if not model.is_finite():
        raise collective_error(DataError(f"{path} has weights that are not finite"))
    return model, description


def read_shortened(path: Path, host: Tensors) -> None:
    """Fill `host` from the file, with only as many of the learned positions as `host` has."""
    positions = host.get(LEARNED)
    if positions is None:
        read_into(path, host)
        return
    rows = read_header(path).tensors[LEARNED].shape[0]
    whole = np.empty((max(rows, len(positions)), *positions.shape[1:]), positions.dtype)
    read_into(path, {**host, LEARNED: whole})
    positions[...] = whole[: len(positions)]


def load_description(path: Path, comm: Comm) -> Description:
    """Return a file's description, after rank 0 has checked it against its tensors. Collective."""
    return _parse(on_root(comm, lambda: _checked_metadata(path)), path)


def read_description(path: Path) -> Description:
    """Return a file's description, checked against its tensors. For a single process."""
    return _parse(_checked_metadata(path), path)


def on_host(model: Model, tensors: FlatBuffer, prefix: str = "") -> dict[str, Array]:
    """Return tensors as NumPy arrays; arrays in host memory are not copied."""
    return {prefix + name: model.kernels.to_host(array) for name, array in tensors.items()}


def fill(
    comm: Comm, model: Model, buffers: Mapping[str, FlatBuffer], read: Callable[[Tensors], None]
) -> None:
    """Read values on rank 0 into buffers of the model's layout and broadcast them. Collective.

    The keys of `buffers` are the prefixes of their tensor names in the file.
    """
    host: dict[str, Array] = {}
    if comm.rank == 0:
        for prefix, tensors in buffers.items():
            host |= on_host(model, tensors, prefix)
    on_root(comm, lambda: read(host))
    for prefix, tensors in buffers.items():
        for name, array in tensors.items() if host else ():
            model.kernels.put(array, host[prefix + name])
        comm.broadcast(tensors.flat)
    model.refresh()


def _checked_metadata(path: Path) -> dict[str, str]:
    header = read_header(path)
    description = _parse(_own_metadata(header, path), path)
    config = description.run.model
    if description.tokenizer and description.tokenizer.size > config.vocab_size:
        raise DataError(
            f"{path}: its tokenizer has {description.tokenizer.size} entries, "
            f"more than the {config.vocab_size} of its configuration"
        )
    if config.n_layer > len(header.tensors):
        raise DataError(f"{path}: its configuration has {config.n_layer} layers, more than the file")
    if description.rounded:
        components().quantized(description.rounded).refuse_others(header, config, path)
    else:
        refuse_misfits(header, {spec.name: spec.shape for spec in description.layout.specs}, path)
    return header.metadata


def _own_metadata(header: Header, path: Path) -> dict[str, str]:
    """Return the metadata of a distgpt file in a supported format version."""
    result = header.metadata
    is_described = {"format", "format_version", "config", "tokenizer"} <= result.keys()
    if BASE in result and is_described and result["format"] not in components().parts:
        known = ", ".join(components().parts)
        raise DataError(f"{path} has the unknown format {result['format']!r:.40}; known: {known}")
    if not is_described or (BASE not in result and result["format"] != FORMAT):
        foreign = path.with_name("config.json").is_file()
        hint = f"; to import a transformers model: {import_command(path.parent)}" if foreign else ""
        raise DataError(f"{path} was not written by distgpt, because it does not describe its model{hint}")
    if (version := result["format_version"]) not in READ:
        raise DataError(
            f"{path} has format version {version!r:.20}; this distgpt reads {FORMAT_VERSION}; upgrade distgpt"
        )
    if lost := [name for name in READ[version] if name not in result]:
        raise DataError(f"{path} is corrupt: its checksum {lost[0]} is missing")
    if QUANTISED in result and version != ROUNDED_VERSION:
        raise DataError(f"{path} is marked as quantized, which format version {version} does not support")
    return result


def _parse(metadata: dict[str, str], path: Path) -> Description:
    """Parse a file's metadata, or raise a DataError."""
    untrainable = ""
    try:
        values = parse_toml(metadata["config"], str(path))
        values = {name: each for name, each in values.items() if name not in REMOVED}
        # A whole model is usable even if its training settings are invalid, because other versions may have
        # more.
        run = RunConfig().with_values({name: each for name, each in values.items() if name in MODEL})
        try:
            run = RunConfig().with_values(values)
        except UsageError as error:
            if BASE in metadata:
                raise
            untrainable = str(error)
    except (UsageError, ValueError, ArithmeticError) as error:  # also for numbers that Python cannot convert
        hint = f"; {EXTENDED}" if str(error).startswith("mlp is") else ""
        raise DataError(f"{path}: its configuration is invalid: {error}{hint}") from None
    except RecursionError:
        raise DataError(f"{path}: configuration nested too deeply") from None
    saved = metadata["tokenizer"]
    tokenizer = tokenizer_from_json(saved, str(path)) if saved else None
    rounded = ""
    if metadata["format_version"] == ROUNDED_VERSION:
        rounded = rounded_dtype(metadata, path)
    if BASE not in metadata:
        return Description(run, tokenizer, rounded, untrainable=untrainable)
    try:
        base = checked(Base, parse_json(metadata[BASE]))
    except ValueError as error:
        raise DataError(f"{path} is corrupt: invalid reference to its base model: {error}") from None
    if rounded:
        raise DataError(f"{path} is corrupt: a part of a model cannot be quantized")
    part = metadata["format"]
    components().part(part).refuse_damaged(run, path)
    return Description(run, tokenizer, part=part, base=base)


def open_model(
    stage: Stage,
    weights: Path,
    dtype: str,
    context: int | None = None,
    matmul: str = "auto",
    usual: Callable[[Description], str] | None = None,
    part: Path | None = None,
) -> tuple[Model, Description, Path, str]:
    """Load a model and merge its part. Collective, as `usual` may be.

    On CPUs, dtype auto is a quantized file's dtype, otherwise the result of `usual`, otherwise float32. Also
    return the whole model's weights file and the compute dtype.
    """

    def find() -> tuple[Path, str]:
        result = weights_of(part or weights)
        kind = read_description(result).part
        if part and not kind:
            raise UsageError(f"{result} is a complete model; pass it as --weights")
        return result, kind

    whole, kind = on_root(stage.comm, find)
    merge = None
    if kind:
        named = (weights, stage.comm, whole) if part else (whole, stage.comm)
        whole, merge = components().part(kind).whole(*named)
    if dtype == AUTO_DTYPE:
        about = load_description(whole, stage.comm)
        rounded = "" if stage.on_gpu else about.rounded
        dtype = rounded or (usual(about) if usual else "float32")
    model, about = load_model(whole, stage.kernels(dtype, matmul), stage.comm, context, merge)
    return model, about, whole, dtype


def random_model(config: ModelConfig, dtype: str, kernels_for: Callable[[str], Kernels], seed: int) -> Model:
    """Return a model with random weights in any compute dtype, including quantized ones."""
    is_rounded = dtype in QUANTIZED_DTYPES
    model = Model(Architecture(config), kernels_for("float32" if is_rounded else dtype))
    model.initialise(seed)
    return components().quantized(dtype).of(model) if is_rounded else model

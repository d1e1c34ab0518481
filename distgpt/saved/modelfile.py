"""A model as one self-describing file: its weights, in float or int8, its configuration and its tokenizer.

In int8 a matrix is stored as I8 under its name, and its scales as BF16 under its name and ".scales": one
for each block of columns of a row. All else is float32. The metadata say so, with the size of a block."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.checked import checked, parse_json
from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.data.tokenizers.naming import Tokenizer, tokenizer_from_json
from distgpt.errors import DataError, UsageError, command_line
from distgpt.formatting import size
from distgpt.kernels.api import Array, Kernels
from distgpt.kernels.low_precision import MOST, Quantised, quantise, restored
from distgpt.kernels.matmul.int8 import BLOCK
from distgpt.model.lora import adapter_layout
from distgpt.model.memory import LEARNED, FlatBuffer, Layout, Spec, is_quantised
from distgpt.model.model import Architecture, Model
from distgpt.saved.rundir import find_weights, import_command
from distgpt.saved.tensors import (
    DATA_SUM,
    HEADER_SUM,
    Header,
    Kind,
    LazyTensors,
    Tensors,
    read_header,
    read_into,
    read_rows,
    refuse_misfits,
    verify_data,
    write_tensors,
)

if TYPE_CHECKING:  # with compiled loops, which files are read and written without
    from distgpt.kernels.cpu_int8 import Int8Kernels
    from distgpt.model.packed import Int8Model


INT8_VERSION = "3"  # of the weights format, for files in int8 alone
QUANTISED, SCALES = "quantised", ".scales"  # in the metadata; behind a matrix's name
SOURCE_SUM = "source_sha256"  # in the metadata: the checksum of the data that were rounded
WORDS = f"int8, blocks of {BLOCK}"


def is_int8(metadata: Mapping[str, str]) -> bool:
    """Return if a file with this metadata is in int8: only its version says so."""
    return metadata["format_version"] == INT8_VERSION


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


class Merge(ABC):
    """Adds to the matrices of a model as they are read; for rank 0, but for the tokenizer."""

    tokenizer: Tokenizer | None  # in place of the model's, if there is one

    @abstractmethod
    def __call__(self, name: str, array: Array) -> None: ...


def read_parameter(path: Path, header: Header, spec: Spec, merge: Merge | None = None) -> Any:
    """A parameter in the form of an Int8Model: a matrix is rounded unless the file has it in int8."""
    if merge or not is_int8(header.metadata) or not is_quantised(spec):
        array = np.empty(spec.shape, np.float32)
        read_float(path, header, spec, array)
        if merge:
            merge(spec.name, array)
        return quantise(array) if is_quantised(spec) else array
    scales = _read(path, header, spec.name + SCALES, scales_shape(spec), np.float32)
    if not (scales >= 0).all() or not (scales <= np.finfo(np.float32).max / MOST).all():
        raise DataError(f"{path}: {spec.name + SCALES} holds scales that are negative or not finite")
    bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
    return Quantised(_read(path, header, spec.name, spec.shape, np.int8), bits)


def read_float(path: Path, header: Header, spec: Spec, array: Array) -> None:
    """Fill an array of floats with a parameter, or with its first rows, also from a file in int8."""
    if is_int8(header.metadata) and is_quantised(spec):
        array[...] = restored(read_parameter(path, header, spec))
    else:
        read_rows(path, header, spec.name, array)
    _finite(array, path)


def fill_from_int8(path: Path, host: Mapping[str, Array], config: ModelConfig) -> None:
    """Arrays of float ← the parameters that a file in int8 stands for."""
    header = verified(path)
    for spec in Architecture(config).layout.specs:
        read_float(path, header, spec, host[spec.name])


def load_int8(
    path: Path, config: ModelConfig, kernels: Int8Kernels, comm: Comm, merge: Merge | None = None
) -> Int8Model:
    """Rank 0 reads parameter after parameter, and all ranks get them. Collective."""
    from distgpt.model.packed import Int8Model

    headers: list[Header] = []
    on_root(comm, lambda: headers.append(verified(path)))
    params: dict[str, Any] = {}
    for spec in Architecture(config).layout.specs:
        found: Any = np.empty(spec.shape, np.float32)
        if is_quantised(spec):
            found = Quantised(np.empty(spec.shape, np.int8), np.empty(scales_shape(spec), np.uint16))
        on_root(comm, partial(_take, found, path, headers, spec, merge))
        for array in found if isinstance(found, Quantised) else (found,):
            comm.broadcast(array.reshape(-1))
        params[spec.name] = found
    return Int8Model(config, kernels, params)


def quantize(path: Path, out: Path) -> str:
    """Write a weights file of floats in int8. Return what was done, for people."""
    path = find_weights(path)
    about, header = read_description(path), verified(path)
    about.refuse_adapter(path)
    config = about.run.model
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
    if DATA_SUM in header.metadata:
        kept[SOURCE_SUM] = header.metadata[DATA_SUM]
    write_tensors(out, LazyTensors(kinds, make), {**kept, "format_version": INT8_VERSION, QUANTISED: WORDS})
    before, after = (size(file.stat().st_size) for file in (path, out))
    return f"{out}: {WORDS}; {before} became {after}"


def verified(path: Path) -> Header:
    header = read_header(path)
    verify_data(path, header)
    return header


def _take(to: Any, path: Path, headers: list[Header], spec: Spec, merge: Merge | None) -> None:
    found = read_parameter(path, headers[0], spec, merge)
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


FORMAT, FORMAT_VERSION = "distgpt-weights", "2"
READ = {
    "1": (),
    "2": (DATA_SUM, HEADER_SUM),
    INT8_VERSION: (DATA_SUM, HEADER_SUM),
}  # which checksums a file must have, by its version
ORIGIN = "origin"  # in the metadata of a model that was not trained here: where it is from
ADAPTER, BASE = "distgpt-adapter", "base"  # a format, of adapters alone; in the metadata: their model


@dataclass(frozen=True, slots=True)
class Base:
    """The weights file that adapters stand beside: its path, and the checksum of its data."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Description:
    """The configuration and tokenizer in a weights file. A model built in Python has no tokenizer."""

    run: RunConfig
    tokenizer: Tokenizer | None
    rounded: bool = False  # to int8
    base: Base | None = None  # of adapters, whose tensors alone are in the file

    def refuse_adapter(self, path: Path | str) -> None:
        """Refuse a file that holds no whole model."""
        if self.base:
            merge = command_line("weights", "merge", "--adapter", path, "--out", "merged.safetensors")
            raise UsageError(f"{path} is an adapter, without the model that it stands beside: first {merge}")

    @property
    def layout(self) -> Layout:
        """Return the layout of the tensors in the file."""
        return adapter_layout(self.run) if self.base else Architecture(self.run.model).layout

    def refuse_training(self, t: TrainConfig) -> None:
        """Refuse to train all weights of a file in int8; adapters may stand beside them."""
        if self.rounded and not t.lora_rank:
            raise UsageError(
                f"{t.init} is in int8, which cannot be trained further: take the file it is from, or train"
                " adapters beside it (--lora-rank)"
            )

    def to_metadata(self) -> dict[str, str]:
        tokenizer = self.tokenizer.to_json() if self.tokenizer else ""
        version = {"format": ADAPTER if self.base else FORMAT, "format_version": FORMAT_VERSION}
        base = {BASE: json.dumps(asdict(self.base))} if self.base else {}
        return {**version, **base, "config": self.run.to_toml(), "tokenizer": tokenizer}


def save_model(path: Path, model: Model, description: Description) -> str:
    """Write the file and return the checksum of its header."""
    return write_tensors(path, on_host(model, model.weights), description.to_metadata())


def load_model(
    path: Path, kernels: Kernels, comm: Comm, context: int | None = None, merge: Merge | None = None
) -> tuple[Model, Description]:
    """Rank 0 reads the file and checks it before it allocates memory; all ranks get it. Collective.

    `path` may also be a run's directory, or a checkpoint.
    A model without learned positions accepts another `context` than it was trained with.
    """
    path = Path(on_root(comm, lambda: str(find_weights(path))))
    description = load_description(path, comm)
    on_root(comm, lambda: description.refuse_adapter(path))
    if merge:
        description = replace(description, tokenizer=merge.tokenizer or description.tokenizer)
    config = description.run.model
    if context is not None and context != config.seq_len:
        if config.positions == "learned":
            raise shared(
                UsageError(
                    f"{path} has learned positions: its context is {config.seq_len} and cannot be {context}"
                )
            )
        try:
            config = replace(config, seq_len=context)
        except UsageError as error:
            raise shared(error) from None
    if (int8 := _in_int8(config, kernels, path, comm, merge)) is not None:
        return int8, description
    model = Model(config, kernels)

    def read(host: Tensors) -> None:
        if description.rounded:
            fill_from_int8(path, host, config)
        else:
            read_into(path, host)
        if merge:
            for name, array in host.items():
                merge(name, array)

    fill(comm, model, {"": model.weights}, read)
    if not model.is_finite():
        raise shared(DataError(f"{path} holds weights that are not finite"))
    return model, description


def dtype_of(path: Path, asked: str, comm: Comm, on_gpu: bool = False) -> str:
    """The dtype to compute in: what was asked for; of `auto` float32, on CPUs int8 for a file in int8."""
    if asked != "auto":
        return asked
    if on_gpu:
        return "float32"
    rounded = on_root(comm, lambda: read_description(find_weights(path)).rounded)
    return "int8" if rounded else "float32"


def _in_int8(
    config: ModelConfig, kernels: Kernels, path: Path, comm: Comm, merge: Merge | None
) -> Model | None:
    """The model, where the kernels are those of int8. Collective."""
    if kernels.capabilities.is_async:
        return None
    from distgpt.kernels.cpu_int8 import Int8Kernels  # which compiled loops come with

    if not isinstance(kernels, Int8Kernels):
        return None
    return load_int8(path, config, kernels, comm, merge)


def read_shortened(path: Path, host: Tensors) -> None:
    """Fill `host` from the file; of its learned positions only the first, as many as `host` has."""
    positions = host.get(LEARNED)
    if positions is None:
        read_into(path, host)
        return
    rows = read_header(path).tensors[LEARNED].shape[0]
    whole = np.empty((max(rows, len(positions)), *positions.shape[1:]), positions.dtype)
    read_into(path, {**host, LEARNED: whole})
    positions[...] = whole[: len(positions)]


def load_description(path: Path, comm: Comm) -> Description:
    """The description in the file, checked by rank 0 against its tensors. Collective."""
    return _parse(on_root(comm, lambda: _checked_metadata(path)), path)


def read_description(path: Path) -> Description:
    """Return the description in the file, checked against its tensors, in a single process."""
    return _parse(_checked_metadata(path), path)


def on_host(model: Model, tensors: FlatBuffer, prefix: str = "") -> dict[str, Array]:
    """Tensors as NumPy arrays; those in host memory are not copied."""
    return {prefix + name: model.kernels.to_host(array) for name, array in tensors.items()}


def fill(
    comm: Comm, model: Model, buffers: Mapping[str, FlatBuffer], read: Callable[[Tensors], None]
) -> None:
    """Rank 0 reads values into buffers of the model's layout and broadcasts them. Collective.

    The keys of `buffers` are the prefixes of their tensors' names in the file.
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
            f"more than the vocabulary of {config.vocab_size} in its configuration"
        )
    if config.n_layer > len(header.tensors):
        raise DataError(f"{path}: its configuration asks for {config.n_layer} layers, which it does not hold")
    if description.rounded:
        refuse_others(header, config, path)
    else:
        refuse_misfits(header, {spec.name: spec.shape for spec in description.layout.specs}, path)
    return header.metadata


def _own_metadata(header: Header, path: Path) -> dict[str, str]:
    """The metadata of a file written by distgpt in this version of the format."""
    found = header.metadata
    formats = (ADAPTER,) if BASE in found else (FORMAT,)
    if found.get("format") not in formats or not {"format_version", "config", "tokenizer"} <= found.keys():
        foreign = path.with_name("config.json").is_file()
        hint = f"; if it is a model of transformers: first {import_command(path.parent)}" if foreign else ""
        raise DataError(f"{path}: not written by distgpt: its metadata lack the model's description{hint}")
    if (version := found["format_version"]) not in READ:
        raise DataError(
            f"{path} has format version {version!r:.20}, this distgpt reads {FORMAT_VERSION}: upgrade it"
        )
    if lost := [name for name in READ[version] if name not in found]:
        raise DataError(f"{path} is damaged: its checksum {lost[0]} is missing")
    if QUANTISED in found and not is_int8(found):
        raise DataError(f"{path} says that it is quantised, which format version {version} cannot be")
    return found


def _parse(metadata: dict[str, str], path: Path) -> Description:
    try:
        run = RunConfig().with_values(parse_toml(metadata["config"], str(path)))
    except (UsageError, ValueError, ArithmeticError) as error:  # of numbers beyond what Python converts
        raise DataError(f"{path}: its configuration is invalid: {error}") from None
    except RecursionError:
        raise DataError(f"{path}: its configuration is nested too deeply") from None
    tokenizer = metadata["tokenizer"]
    rounded = is_int8(metadata)
    base = None
    if BASE in metadata:
        try:
            base = checked(Base, parse_json(metadata[BASE]))
        except ValueError as error:
            raise DataError(
                f"{path} is damaged: what it says of its model is no such thing: {error}"
            ) from None
        if not run.train.lora_rank or rounded:
            raise DataError(f"{path} is damaged: it is an adapter, and its configuration names no rank")
    return Description(run, tokenizer_from_json(tokenizer, str(path)) if tokenizer else None, rounded, base)

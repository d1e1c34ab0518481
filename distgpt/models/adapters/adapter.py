"""Adapters on disk: small weights files that name the model they stand beside; read, and merged into it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError, command_line
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Base, Description, load_description, read_description
from distgpt.core.saved.tensors import (
    DATA_SUM,
    Header,
    LazyTensors,
    read_header,
    read_into,
    write_tensors,
)
from distgpt.core.saved.weights import SOURCE_SUM, find_weights, read_float, verified, weights_of
from distgpt.core.train.seams import ModelKind
from distgpt.models.adapters.lora import AdaptedModel, adapter_layout, adapters_by_matrix

ADAPTER = "distgpt-adapter"  # the format of a file of adapters alone


def base_of(path: Path) -> Base:
    """Return what an adapter says of the weights file that it stands beside."""
    metadata = read_header(path).metadata
    known = metadata.get(SOURCE_SUM) or metadata.get(DATA_SUM)
    if known is None:
        raise DataError(f"{path} carries no checksum, as files of a former version: write it anew first")
    return Base(str(path.absolute()), known)


def refuse_other_base(adapter: Path, about: Description, weights: Path) -> None:
    """Refuse an adapter that was trained beside another model."""
    assert about.base
    if about.base.sha256 != base_of(weights).sha256:
        raise DataError(
            f"{adapter} is of another model than {weights}: it was trained beside {about.base.file}"
        )


def with_adapter(weights: Path, adapter: Path | None, comm: Comm) -> tuple[Path, Folding | None]:
    """Return the weights file of a whole model, and what merges the adapter into it. Collective.

    Where `weights` is an adapter, or the directory of a run that trained one, it names its model itself.
    """

    def decide() -> list[str]:
        found = weights_of(weights)
        own = read_description(found).base
        if adapter is None and own is None:
            return [str(found), ""]
        if own and adapter:
            raise UsageError(f"{found} is an adapter: as --weights give the model that it stands beside")
        whole, chosen = (Path(own.file), found) if own else (found, find_weights(adapter or found))
        about = read_description(chosen)
        if about.base is None:
            raise UsageError(f"{chosen} is no adapter but a whole model: give it as --weights")
        if about.part != ADAPTER:
            raise UsageError(f"{chosen} holds a part of kind {about.part!r}: only adapters can be merged")
        if not whole.is_file():
            raise DataError(
                f"{chosen} is an adapter, and {whole} is missing: give --weights MODEL --adapter {chosen}"
            )
        refuse_other_base(chosen, about, whole)
        return [str(whole), str(chosen)]

    whole, chosen = map(Path, on_root(comm, decide))
    if chosen == Path():
        return whole, None
    about = load_description(chosen, comm)
    folding: list[Folding] = []
    on_root(comm, lambda: folding.append(read_adapter(chosen, about)))
    return whole, folding[0] if folding else Folding(about, {})


def read_adapter(path: Path, about: Description) -> Folding:
    """Read an adapter's tensors, and refuse those that are not finite."""
    tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in adapter_layout(about.run).specs}
    read_into(path, tensors)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} holds values that are not finite")
    return Folding(about, tensors, path)


class Folding:
    """A `Merge`: adds an adapter to the matrices of its model, as they are read."""

    def __init__(self, about: Description, tensors: dict[str, Array], source: object = "an adapter") -> None:
        self.tokenizer, self.tensors, self._source = about.tokenizer, tensors, source
        self._adapters = adapters_by_matrix(about.run)

    def __call__(self, name: str, array: Array) -> None:
        for adapter in self._adapters.get(name, []):
            b, a = (self.tensors[f"{adapter.name}.lora_{kind}"] for kind in "ba")
            with np.errstate(all="ignore"):
                change = np.float32(adapter.scale) * (b @ a)
            if not np.isfinite(change).all():  # else the model's file would be blamed for it later
                raise DataError(f"{self._source}: what {adapter.name} adds to the model is not finite")
            array[adapter.rows] += change


def merge(weights: Path | None, adapter: Path, out: Path, comm: Comm) -> str:
    """Write a weights file with the adapter added to the model's matrices. Return what was done."""
    whole, folding = with_adapter(weights or adapter, adapter if weights else None, comm)
    if folding is None:
        raise UsageError(f"{adapter} is no adapter but a whole model: there is nothing to merge")
    about, header = read_description(whole), verified(whole)
    if about.rounded:
        raise UsageError(f"{whole} is in {about.rounded}: merge into the file that it is from, then quantize")
    specs = {spec.name: spec for spec in Architecture(about.run.model).layout.specs}
    kinds = {name: (np.dtype(np.float32), spec.shape) for name, spec in specs.items()}

    def make(name: str) -> Any:
        array = np.empty(specs[name].shape, np.float32)
        read_float(whole, header, specs[name], array)
        folding(name, array)
        return array

    tokenizer = folding.tokenizer or about.tokenizer
    metadata = {**header.facts(), **Description(about.run, tokenizer).to_metadata()}
    write_tensors(out, LazyTensors(kinds, make), metadata)
    return f"{out}: {whole} with {adapter} merged into it, {size(out.stat().st_size)}"


class AdapterFile:
    """A `PartKind`: adapters beside a model's matrices."""

    def layout(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def refuse_damaged(self, run: RunConfig, path: Path) -> None:
        if not run.train.lora_rank:
            raise DataError(f"{path} is damaged: it is an adapter, and its configuration names no rank")

    def describe(self, run: RunConfig) -> str:
        return f"an adapter of rank {run.train.lora_rank} beside {run.train.lora_matrices} of"

    def refuse_alone(self, path: Path | str) -> None:
        merge = command_line("weights", "merge", "--adapter", path, "--out", "merged.safetensors")
        raise UsageError(f"{path} is an adapter, without the model that it stands beside: first {merge}")

    def whole(self, weights: Path, comm: Comm, part: Path | None = None) -> tuple[Path, Folding]:
        whole, folding = with_adapter(weights, part, comm)
        assert folding is not None  # as one of the two is an adapter
        return whole, folding


FILES = AdapterFile()


# -- a run that trains adapters


class AdapterKind(ModelKind):
    """The kind of an `AdaptedModel`."""

    may_move = frozenset({"init"})  # its content is compared: `refuse_origin`

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return AdaptedModel(run, kernels)

    def trained(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Name the model that the adapters stand beside, too."""
        found = on_root(comm, lambda: asdict(base_of(Path(run.train.init))))
        return Description(run, tokenizer, part=ADAPTER, base=Base(**found))

    def begins_with(self, t: TrainConfig) -> str:
        """Adapters are drawn: --init names the model beside which they stand."""
        return ""

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Fill what the adapters stand beside, tensor by tensor, so that nothing is there twice."""
        assert isinstance(model, AdaptedModel)
        path, headers = Path(t.init), list[Header]()
        on_root(comm, lambda: headers.append(verified(path)))
        for spec in model.frozen.layout.specs:
            host = np.empty(spec.shape, np.promote_types(model.kernels.wide, np.float32))
            on_root(comm, lambda: read_float(path, headers[0], spec, host))  # noqa: B023
            if comm.rank == 0:
                model.kernels.put(model.frozen[spec.name], host)
        comm.broadcast(model.frozen.flat)

    def use_of_init(self, t: TrainConfig) -> str:
        return f"gets adapters of rank {t.lora_rank}"

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Accept a model that is rounded: adapters may stand beside it."""
        if not resumed:
            origin.refuse_incomplete(weights)
        elif origin.base:
            refuse_other_base(weights, origin, Path(t.init))

    def refuse_moved(self, t: TrainConfig) -> None:
        if not Path(t.init).is_file():
            raise DataError(
                f"{t.init} is not there: --init says where the model of this run's adapters is now"
            )


ADAPTERS = AdapterKind()


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about what adapters do not go with."""
    if not t.init:
        raise UsageError("--lora-rank trains adapters beside a model's weights: name them with --init FILE")
    if t.optimizer != "adamw":
        raise UsageError(f"--lora-rank does not go with --optimizer {t.optimizer}: use adamw")

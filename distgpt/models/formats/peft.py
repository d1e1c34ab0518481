"""Import and export of PEFT adapters: a directory with adapter_config.json and adapter_model.safetensors.

PEFT has one adapter per linear layer of transformers. If a layer combines several of our matrices, such as
GPT-2's c_attn, import copies its A to each of them, and export adds up their ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.base.checked import checked
from distgpt.core.base.errors import DataError, UsageError, command_line
from distgpt.core.base.files import atomic_file
from distgpt.core.config import LORA_MATRICES, RunConfig
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import ORIGIN, Description, read_description
from distgpt.core.saved.tensors import DTYPES, Header, read_header, read_rows, write_tensors
from distgpt.core.saved.weights import find_weights
from distgpt.models.adapters import (
    ADAPTER,
    Adapter,
    adapter_layout,
    adapters_by_matrix,
    base_of,
    read_adapter,
)
from distgpt.models.formats.families import HEAD, Family, TensorMapping, family_for
from distgpt.models.formats.huggingface import (
    Note,
    narrowed,
    new_directory,
    read_object,
    refuse_directory,
    refuse_nonfinite,
    refuse_place,
)

SETTINGS, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
SIDES = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
# Settings that must be absent, false or empty.
UNKNOWN = (
    *("use_dora", "use_qalora", "use_bdlora", "modules_to_save", "trainable_token_indices"),
    *("target_parameters", "layer_replication", "alora_invocation_tokens", "lora_bias"),
)
CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")  # initializations that change the base model


class Theirs(NamedTuple):
    """A PEFT adapter of one linear layer of transformers: y += scale · B A x."""

    a: Array
    b: Array
    scale: float


def is_adapter(source: str) -> bool:
    return (Path(source) / SETTINGS).is_file()


def import_adapter(source: str, weights: Path | None, out: Path, note: Note) -> str:
    """Write a PEFT directory as an adapter of these weights. Return a summary."""
    folder = Path(source)
    refuse_place(out)
    settings = read_object(folder / SETTINGS)
    if weights is None:
        name = f"{settings.get('base_model_name_or_path') or 'its model'!s:.80}"
        raise UsageError(f"{source} is a PEFT adapter; pass the weights file of {name} with --weights")
    weights = find_weights(weights)
    about = read_description(weights)
    about.reject_incomplete(weights)
    family, path = family_for(about.run.model, weights), folder / TENSORS
    layers = {
        family.full_name(m.theirs).removesuffix(".weight"): m for m in adaptable_layers(family, about.run)
    }
    result = _read(path, read_header(path), layers, _scales(settings, str(folder / SETTINGS)))
    beside = replace(about.run, train=replace(about.run.train, init=str(weights)))
    run = _run_of(beside, result, layers)
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in adapter_layout(run).specs}
    ours = adapters_by_matrix(run)
    with np.errstate(all="ignore"):  # refuse_nonfinite checks the results
        for name, theirs in result.items():
            for adapter, rows in pieces_in(ours, layers[name]):
                rank, factor = len(theirs.a), np.float32(theirs.scale / run.train.lora_scale)
                tensors[f"{adapter.name}.lora_a"][:rank] = theirs.a
                tensors[f"{adapter.name}.lora_b"][:, :rank] = scaled = factor * theirs.b[rows]
                refuse_nonfinite(scaled, f"{name}{SIDES['b']}, scaled by lora_alpha,", path)
    metadata = Description(run, about.tokenizer, part=ADAPTER, base=base_of(weights)).to_metadata()
    write_tensors(out, tensors, {**metadata, ORIGIN: f"adapter imported from {folder.resolve().name}"})
    note(f"adapters of rank {run.train.lora_rank} for {run.train.lora_matrices} of {weights}")
    use = command_line("infer", "--weights", weights, "--adapter", out, "--prompt", "…")
    return f"adapter    {out}\nnext       {use}"


def adaptable_layers(family: Family, run: RunConfig) -> list[TensorMapping]:
    """Return their linear layers in the model's blocks."""
    mapped = family.mappings(run.model)
    return [m for m in mapped if len(m.shape) == 2 and m.ours.startswith("blocks.")]


def _scales(settings: Mapping[str, Any], source: str) -> Any:
    """Return a function from (module name, rank) to scale. Raises a DataError for unsupported settings."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise DataError(f"{source}: peft_type must be LORA, not {kind!r:.40}")
    unknown = [name for name in UNKNOWN if settings.get(name)]
    if unknown := unknown + ["bias"] * (settings.get("bias", "none") != "none"):
        raise DataError(f"{source}: {unknown[0]} is not supported by distgpt's adapters")
    if str(settings.get("init_lora_weights", "")).startswith(CHANGING):
        raise DataError(
            f"{source}: init_lora_weights is {settings['init_lora_weights']!r:.40}, which changes the model"
            " itself; convert it to plain LoRA in PEFT first"
        )
    try:
        alpha = checked(float, settings.get("lora_alpha"), ("lora_alpha",))
        patterns = checked(dict[str, float], settings.get("alpha_pattern") or {}, ("alpha_pattern",))
    except ValueError as error:
        raise DataError(f"{source}: {error}") from None
    if odd := [name for name in patterns if not re.fullmatch(r"[\w.]+", name)]:
        raise DataError(f"{source}: alpha_pattern has {odd[0]!r:.40}, which is not a plain layer name")
    if not all(0 < each <= 1e6 for each in (alpha, *patterns.values())):
        raise DataError(f"{source}: lora_alpha must be above 0 and at most 1,000,000")

    def scale(module: str, rank: int) -> float:
        own = (each for name, each in patterns.items() if f".{module}".endswith(f".{name}"))
        return float(next(own, alpha) / (rank**0.5 if settings.get("use_rslora") else rank))

    return scale


def _read(path: Path, header: Header, layers: Mapping[str, TensorMapping], scale: Any) -> dict[str, Theirs]:
    """Read every adapter by the name of its layer. Raises a DataError if one does not fit the model."""
    result: dict[str, Theirs] = {}
    names = {name.removeprefix(PREFIX): name for name in header.tensors}
    modules = {name.removesuffix(side) for name in names for side in SIDES.values() if name.endswith(side)}
    for name in names:
        module = name.rsplit(".lora_", 1)[0]
        if module not in modules or module not in layers:
            where = "the output layer" if HEAD.startswith(module) else f"{module!r:.80}"
            raise DataError(f"{path}: {where} is not a matrix of this model's layers that PEFT supports")
    for module in sorted(modules):
        outputs, inputs = layers[module].shape[:: -1 if layers[module].transposed else 1]
        entries = [header.tensors.get(names.get(module + side, "")) for side in SIDES.values()]
        shapes = [entry.shape for entry in entries if entry and entry.dtype in DTYPES]
        rank = shapes[0][0] if len(shapes) == 2 and shapes[0] else 0
        if not 1 <= rank <= 1 << 12 or shapes != [(rank, inputs), (outputs, rank)]:
            raise DataError(f"{path}: {module} does not fit a layer of {inputs} inputs, {outputs} outputs")
        a, b = (np.empty(shape, np.float32) for shape in shapes)
        for side, array in zip(SIDES.values(), (a, b), strict=True):
            read_rows(path, header, names[module + side], array)
            refuse_nonfinite(array, module + side, path)
        result[module] = Theirs(a, b, scale(module, rank))
    if not result:
        raise DataError(f"{path} has no adapters")
    return result


def _run_of(run: RunConfig, found: Mapping[str, Theirs], layers: Mapping[str, TensorMapping]) -> RunConfig:
    """Return settings that hold all of their adapters: the largest rank, and a single scale."""
    rank = max(len(theirs.a) for theirs in found.values())
    alpha = rank * next(iter(found.values())).scale
    every = replace(run, train=replace(run.train, lora_rank=rank, lora_alpha=alpha, lora_matrices="all"))
    ours = adapters_by_matrix(every)
    used = {adapter.piece for name in found for adapter, _ in pieces_in(ours, layers[name])}
    if used == {adapter.piece for some in ours.values() for adapter in some}:
        return every
    chosen = ",".join(name for name in LORA_MATRICES if name in used)
    return replace(every, train=replace(every.train, lora_matrices=chosen))


def pieces_in(ours: Mapping[str, list[Adapter]], mapping: TensorMapping) -> Iterator[tuple[Adapter, slice]]:
    """Yield our adapters in one of their layers, each with its rows in that layer."""
    for adapter in ours.get(mapping.ours, ()):
        start, stop = adapter.rows.start - mapping.first, adapter.rows.stop - mapping.first
        if start >= 0 and stop <= mapping.rows:
            yield adapter, slice(start, stop)


def export_adapter(path: Path, out: Path, dtype: str, note: Note) -> str:
    """Write a directory that PEFT loads onto the exported model. Return a summary."""
    path = find_weights(path)
    about = read_description(path)
    assert about.base
    family = family_for(about.run.model, path)
    refuse_directory(out)
    held, ours = read_adapter(path, about), adapters_by_matrix(about.run)
    tensors, ranks, layers = dict[str, Array](), dict[str, int](), adaptable_layers(family, about.run)
    for mapping in layers:
        if pieces := list(pieces_in(ours, mapping)):
            module = family.full_name(mapping.theirs).removesuffix(".weight")
            ranks[module] = sum(adapter.rank for adapter, _ in pieces)
            for side, array in zip(SIDES.values(), joined(held, pieces, mapping.rows), strict=True):
                tensors[PREFIX + module + side] = narrowed(array, dtype, module + side, path)
    is_transposed = any(mapping.transposed for mapping in layers)
    settings = _settings(ranks, about.run.train.lora_scale, Path(about.base.file).stem, is_transposed)
    note(f"writing adapters of rank {about.run.train.lora_rank} for {family.title}")
    with new_directory(out) as directory:
        write_tensors(directory / TENSORS, tensors, {"format": "pt"})
        with atomic_file(directory / SETTINGS) as file:
            file.write(json.dumps(settings, indent=1).encode())
    return f"directory  {out}\nnext       PeftModel.from_pretrained(model, {str(out)!r}) in PEFT"


def joined(held: Mapping[str, Array], pieces: list[tuple[Adapter, slice]], rows: int) -> tuple[Array, Array]:
    """Return one A and one B that combine several of our adapters."""
    a = np.concatenate([held[f"{adapter.name}.lora_a"] for adapter, _ in pieces])
    b, end = np.zeros((rows, len(a)), np.float32), 0
    for adapter, own in pieces:
        b[own, end : end + adapter.rank] = held[f"{adapter.name}.lora_b"]
        end += adapter.rank
    return a, b


def _settings(ranks: Mapping[str, int], scale: float, base: str, transposed: bool) -> dict[str, Any]:
    """Return the PEFT settings. A layer is named by its last name if no other kind of layer has that name."""
    kinds = {module: ".".join(module.rsplit(".", 2)[-2:]) for module in ranks}
    last = {kind: kind.split(".")[1] for kind in kinds.values()}
    names = {kind: name if [*last.values()].count(name) == 1 else kind for kind, name in last.items()}
    of_names = {names[kind]: ranks[module] for module, kind in kinds.items()}
    usual = min(of_names.values())
    others = {name: rank for name, rank in of_names.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": scale * usual,
        "lora_dropout": 0.0,
        "target_modules": sorted(of_names),
        "rank_pattern": others,
        "alpha_pattern": {name: scale * rank for name, rank in others.items()},
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }

"""An ensemble: models of one architecture as a single model that averages their predictions.

The members' channels are next to each other. Matrices are block-diagonal, so members do not interact; norms
act on each member's channels (`norm_groups`). The output layer adds the members' logits, divided by their
number, so predictions are the normalized geometric mean of the members'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import size
from distgpt.core.config import ModelConfig
from distgpt.core.model.memory import EMBEDDING, HEAD, VALUES, Spec
from distgpt.core.model.model import Architecture
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import Description, read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import LazyTensors, write_tensors
from distgpt.core.saved.weights import find_weights, read_float, verified


def write_ensemble(members: Sequence[Path], out: Path) -> str:
    """Write a weights file with the ensemble of these models. Return a summary.

    A run counts as its own model, even if it has an ensemble.
    """
    files = [_own_weights(member) for member in members]
    first, *others = (read_description(file) for file in files)
    config = first.run.model
    for file, about in zip(files, [first, *others], strict=True):
        about.reject_incomplete(file)
        if about.run.model != config or _vocabulary(about) != _vocabulary(first):
            raise UsageError(f"{file} has another architecture or tokenizer than {files[0]}")
    whole = ensemble_config(config, len(files))
    headers = [verified(file) for file in files]
    specs = {spec.name: spec for spec in Architecture(config).layout.specs}
    shapes = {spec.name: spec.shape for spec in Architecture(whole).layout.specs}
    kinds = {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}

    def make(name: str) -> Any:
        arrays = [np.empty(specs[name].shape, np.float32) for _ in files]
        for file, header, array in zip(files, headers, arrays, strict=True):
            read_float(file, header, specs[name], array)
        return joined(specs[name], arrays)

    metadata = Description(replace(first.run, model=whole), first.tokenizer).to_metadata()
    write_tensors(out, LazyTensors(kinds, make), metadata)
    return f"{out}: an ensemble of {len(files)} models, {size(out.stat().st_size)}"


def ensemble_config(config: ModelConfig, count: int) -> ModelConfig:
    """Return the architecture of an ensemble of `count` models."""
    gains = config.norm != "rmsnorm" or config.norm_gain or config.qk_norm_gain
    if config.tied or gains or config.bias or config.qkv_bias:
        raise UsageError(
            "an ensemble requires an untied output layer, RMSNorm without gains, and no biases, as in the"
            " presets fast, sprint and tiny"
        )
    return replace(
        config,
        n_embd=count * config.n_embd,
        n_head=count * config.n_head,
        n_kv_head=count * config.n_kv_head,
        mlp_width=count * config.hidden,
        norm_groups=count * config.norm_groups,
    )


def joined(spec: Spec, members: Sequence[Array]) -> Array:
    """Return the ensemble's tensor for one tensor of the members."""
    if spec.group in (EMBEDDING, VALUES):
        return np.concatenate(members, axis=1)
    if spec.group == HEAD:
        return np.concatenate(members, axis=1) / np.float32(len(members))
    count, blocks, start = len(members), [], 0
    for rows, columns in spec.matrices:  # each of q, k and v by itself
        block = np.zeros((count, rows, count, columns), np.float32)
        for i, member in enumerate(members):
            block[i, :, i] = member[start : start + rows]
        blocks.append(block.reshape(count * rows, count * columns))
        start += rows
    return np.concatenate(blocks)


def _own_weights(member: Path) -> Path:
    run = RunDirectory(member)
    own = (file for file in (run.best, run.weights) if file.is_file())
    return next(own, None) or find_weights(member)


def _vocabulary(about: Description) -> str:
    return about.tokenizer.to_json() if about.tokenizer else ""

"""Adapters that a model is opened with: merged into its weights, or for requests that name one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distgpt.adapters.adapter import Folding, with_adapter
from distgpt.adapters.loops.decoding import Adapters, packed_factors
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import Comm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.ops.api import Array


@dataclass(frozen=True, slots=True)
class AdaptersBeside:
    """A `Beside`: an adapter that is merged into the weights, or adapters that requests name."""

    merged: Path | None = None
    named: Sequence[tuple[str, Path]] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.merged,) if self.merged else ()

    def whole(self, weights: Path, comm: Comm) -> tuple[Path, Folding | None]:
        return with_adapter(weights, self.merged, comm)

    def variants(self, weights: Path, stage: Stage, dtype: str) -> NamedAdapters:
        if self.named and (stage.on_gpu or dtype == "float64"):
            raise UsageError("adapters by name are for CPUs, not in float64: merge one by --adapter PATH")
        found = {}
        for name, path in self.named:
            _, folding = with_adapter(weights, path, stage.comm)
            assert folding is not None  # as an adapter was given
            found[name] = folding
        return NamedAdapters(found)


@dataclass(frozen=True, slots=True)
class NamedAdapters:
    """`NamedVariants`: adapters of one model by their names."""

    foldings: Mapping[str, Folding]

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer | None]:
        return {name: each.tokenizer for name, each in self.foldings.items()}

    def packed(self, config: ModelConfig) -> Adapters | None:
        return adapters_of(config, list(self.foldings.values())) if self.foldings else None


def adapters_of(config: ModelConfig, foldings: Sequence[Folding]) -> Adapters:
    """Return adapters as decoding reads them, numbered from 1 in this order."""
    c, hidden = config.n_embd, config.hidden

    def factors(name: str, k: int, rows: int, first: int = 0) -> tuple[Array, Array]:
        """A (rank, k) and scale · B (rows, rank) of all adapters and layers, from a row of a matrix on."""
        found = [
            [each.beside(f"blocks.{i}.{name}.w", first, rows) for i in range(config.n_layer)]
            for each in foldings
        ]
        rank = max(sum(len(a) for a, _, _ in pieces) for layers in found for pieces in layers)
        shape = len(foldings), config.n_layer
        whole_a, whole_b = (np.zeros((*shape, *own), np.float32) for own in ((rank, k), (rows, rank)))
        for to_a, to_b, layers in zip(whole_a, whole_b, found, strict=True):
            for i, pieces in enumerate(layers):
                at = 0
                for a, b, where in pieces:
                    to_a[i, at : at + len(a)], to_b[i, where, at : at + len(a)] = a, b
                    at += len(a)
        return whole_a, packed_factors(whole_b)

    qkv, out = factors("attn.qkv", c, config.qkv_width), factors("attn.proj", config.attention_width, c)
    fc, proj = factors("mlp.fc", c, hidden), factors("mlp.proj", hidden, c)
    gates = factors("mlp.fc", c, hidden, hidden)
    mlp = np.concatenate((fc[0], gates[0]), axis=2)
    return Adapters(
        qkv_a=packed_factors(qkv[0]),
        out_a=packed_factors(out[0]),
        mlp_a=packed_factors(mlp),
        proj_a=packed_factors(proj[0]),
        qkv_b=qkv[1],
        out_b=out[1],
        fc_b=fc[1],
        gates_b=gates[1],
        proj_b=proj[1],
    )

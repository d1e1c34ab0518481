"""Adapters over a base whose matrices stay in int8: each layer's are made in floats when its turn comes.

A row of `models`: "rounded base": "rounded_base:KIND". Of a model of 7 billion parameters the base takes 7
GB instead of 28, and one layer in floats. Lacking today: the base is read as floats here, and then rounded;
files in int8 are read matrix by matrix only into kernels that decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.model.layers import Linear
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import load_model
from distgpt.inference.quantized.integers import Quantised, quantise, restored
from distgpt.models.adapters import (
    AdaptedBlock,
    AdapterKind,
    adapted_architecture,
    adapter_layout,
    adapters_in,
)


def matrices(block: AdaptedBlock) -> list[Linear]:
    return [block.proj, block.fc, block.out, block.qkv]


def kind(linear: Linear) -> str:
    """Return the name that a matrix has in every layer: all layers share its memory."""
    return linear.name.split(".", 2)[2]


class RoundedBaseModel(Model):
    """A model whose adapters are trained; `codes` are its matrices by name, `frozen` all else."""

    def __init__(self, run: RunConfig, kernels: Kernels) -> None:
        architecture, trained = adapted_architecture(run), adapter_layout(run)
        self.adapted = [block for block in architecture.blocks if isinstance(block, AdaptedBlock)]
        self.codes: dict[str, Quantised] = {}
        memory = {kind(each): kernels.zeros(*each.shape) for each in matrices(self.adapted[0])}
        linears = (each for block in self.adapted for each in matrices(block))
        made = {f"{each.name}.w": memory[kind(each)] for each in linears}
        apart = trained.offsets.keys() | made.keys()
        self.frozen = FlatBuffer(
            Layout(spec for spec in architecture.layout.specs if spec.name not in apart), kernels.zeros
        )
        for adapter in adapters_in(architecture):  # merged in place: the floats are this layer's alone
            adapter.place(made[f"{adapter.linear.name}.w"], made[f"{adapter.linear.name}.w"])
        super().__init__(architecture, kernels, trained, {**self.frozen, **made})
        self.groups = [range(i, i + 1) for i in range(self.config.n_layer)]
        self.gradient_scale = run.train.lora_scale

    def prepare(self, layers: range) -> None:
        for block in (self.adapted[i] for i in layers):
            for linear in matrices(block):
                self.kernels.put(self.tensors[f"{linear.name}.w"], restored(self.codes[f"{linear.name}.w"]))
            self.kernels.run_together(block.merge)

    def initial(self, seed: int) -> Iterable[tuple[str, Array]]:
        for spec, random in self.generators(seed):
            values = random.uniform(-1, 1, spec.shape) / spec.shape[1] ** 0.5
            yield spec.name, values.astype(np.float32) * spec.name.endswith("lora_a")


class RoundedBase(AdapterKind):
    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return RoundedBaseModel(run, kernels)

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        assert isinstance(model, RoundedBaseModel)
        base, _ = load_model(Path(t.init), model.kernels, comm)
        for name, array in base.params.items():
            if name in model.frozen:
                model.frozen[name][...] = array
            else:
                model.codes[name] = quantise(array)


KIND = RoundedBase()

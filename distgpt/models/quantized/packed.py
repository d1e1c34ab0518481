"""Models whose matrices are rounded to int8 or int4: packed once, for inference alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.config import ModelConfig
from distgpt.core.model.memory import FlatBuffer, Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Array
from distgpt.inference.decoding.compiled import Packing
from distgpt.inference.decoding.loops.weights import FLOATS, Forms, Layer, Weights, packed_weights
from distgpt.inference.quantized.integers import Quantised
from distgpt.inference.quantized.kernels import Int8Kernels, Packed
from distgpt.inference.quantized.operands import Integers, operand_rows
from distgpt.inference.quantized.rounding import rounded
from distgpt.models.quantized.bits import bits_of

FORMS: Forms = {**FLOATS, Quantised: Integers}


class Int8Model(Model):
    """`params` are by name: int8 or int4 matrices, and float32 arrays for norms, biases and positions."""

    kernels: Int8Kernels

    def __init__(self, config: ModelConfig, kernels: Int8Kernels, params: Mapping[str, Any]) -> None:
        architecture = Architecture(config)
        architecture.positions.bind(kernels, params, {})  # their angles are packed, too
        packed = packed_weights(config, params, architecture.positions.angles, FORMS)
        of_packed: Any = _by_name(config, packed)
        tensors = of_packed | {k: params[k] for k in params if k not in of_packed}
        super().__init__(architecture, kernels, Layout(()), tensors)
        self.params = self.weights = tensors
        self.packing = Packing(packed, operand_rows)

    @property
    def grads(self) -> FlatBuffer:
        raise UsageError(
            f"a model in {self.kernels.rounded} cannot be trained: train it in float32 or bfloat16"
        )

    def alike(self, other: Model) -> Model:
        return int8_of(other, self.kernels)

    def is_finite(self) -> bool:
        """Return whether all that is not in int8 is finite: matrices were checked before."""
        arrays = [x for x in self.params.values() if not isinstance(x, Packed)]
        return all(math.isfinite(float(np.abs(x).max())) for x in arrays)


def int8_of(model: Model, kernels: Int8Kernels) -> Int8Model:
    """Return the same model, rounded to what the kernels are for."""
    params = {}
    for spec in model.layout.specs:
        x = model.kernels.to_host(model.weights[spec.name])
        bits = bits_of(spec, kernels.rounded)
        params[spec.name] = rounded(x, bits, kernels.threads) if bits else np.array(x, np.float32)
    return Int8Model(model.config, kernels, params)


def _by_name(config: ModelConfig, packed: Weights) -> dict[str, Packed]:
    """The matrices of packed weights by the names of the parameters, in the same memory."""
    c, hidden, found = config.n_embd, config.hidden, {}

    def layer(name: str, rows: int, k: int, *layers: Layer) -> None:
        for i in range(config.n_layer):
            parts: tuple[Array, ...] = tuple(each.w[i] for each in layers)
            found[f"blocks.{i}.{name}.w"] = Packed(parts, (rows,) * len(parts), k)

    layer("attn.qkv", config.qkv_width, c, packed.qkv)
    layer("attn.proj", c, config.attention_width, packed.out)
    layer("mlp.fc", hidden, c, packed.fc, *([packed.gates] if config.gated else []))
    layer("mlp.proj", c, hidden, packed.proj)
    found["wte"] = Packed((packed.embedding,), (config.vocab_size,), c)
    for i, values in zip(config.value_layers, packed.values, strict=True):
        kv = config.kv_heads * config.head_size
        found[f"blocks.{i}.values.w"] = Packed((values,), (config.vocab_size,), kv)
    if not config.tied:
        found["head.w"] = Packed((packed.head,), (config.vocab_size,), c)
    return found

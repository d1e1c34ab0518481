"""Models with int8 or int4 matrices, packed once, for inference only, and calibration on text.

Calibration runs the exact model and the partly rounded model on the same tokens in one pass. First, each
matrix is changed to map the rounded model's inputs to the exact outputs, as well as it can. Then GPTQ rounds
it: inputs x give H = Σ x xᵀ, and rounding w to q adds the squared error (w - q) H (w - q)ᵀ. Columns are
rounded one at a time, and the remaining columns change to compensate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.textfile import read_text
from distgpt.core.model.layers import activation_widths
from distgpt.core.model.memory import PREVIOUS, FlatBuffer, Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Affine, Array, Floats2d
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.core.saved.modelfile import load_model
from distgpt.inference.decoding.compiled import Packing
from distgpt.inference.decoding.loops.weights import FLOATS, Forms, Layer, Weights, packed_weights
from distgpt.inference.quantized.integers import BLOCKS, Quantised, nearest, restored
from distgpt.inference.quantized.kernels import Int8Kernels, Packed
from distgpt.inference.quantized.operands import Integers, operand_rows
from distgpt.inference.quantized.rounding import rounded
from distgpt.models.quantized.bits import bits_of

FORMS: Forms = {**FLOATS, Quantised: Integers}


class Int8Model(Model):
    """A quantized model. `params` are int8 or int4 matrices, and float32 norms, biases and positions."""

    kernels: Int8Kernels

    def __init__(self, config: ModelConfig, kernels: Int8Kernels, params: Mapping[str, Any]) -> None:
        architecture = Architecture(config)
        architecture.positions.bind(kernels, params, {})  # the angles are packed with the weights
        packed = packed_weights(config, params, architecture.positions.angles, FORMS)
        of_packed: Any = _by_name(config, packed)
        tensors = of_packed | {k: params[k] for k in params if k not in of_packed}
        super().__init__(architecture, kernels, Layout(()), tensors)
        self.params = self.weights = tensors
        self.packing = Packing(packed, operand_rows)

    @property
    def grads(self) -> FlatBuffer:
        raise UsageError(
            f"a model in {self.kernels.rounded} cannot be trained; train it in float32 or bfloat16"
        )

    def alike(self, other: Model) -> Model:
        return int8_of(other, self.kernels)

    def is_finite(self) -> bool:
        """Return whether the arrays are finite. Quantized matrices were checked earlier."""
        arrays = [x for x in self.params.values() if not isinstance(x, Packed)]
        return all(math.isfinite(float(np.abs(x).max())) for x in arrays)


def int8_of(model: Model, kernels: Int8Kernels) -> Int8Model:
    """Return the same model, rounded for these kernels."""
    params = {}
    for spec in model.layout.specs:
        x = model.kernels.to_host(model.weights[spec.name])
        bits = bits_of(spec, kernels.rounded)
        params[spec.name] = rounded(x, bits, kernels.threads) if bits else np.array(x, np.float32)
    return Int8Model(model.config, kernels, params)


def _by_name(config: ModelConfig, packed: Weights) -> dict[str, Packed]:
    """Return packed matrices by parameter name, in the same memory."""
    c, hidden, result = config.n_embd, config.hidden, {}

    def layer(name: str, rows: int, k: int, *layers: Layer) -> None:
        for i in range(config.n_layer):
            parts: tuple[Array, ...] = tuple(each.w[i] for each in layers)
            result[f"blocks.{i}.{name}.w"] = Packed(parts, (rows,) * len(parts), k)

    layer("attn.qkv", config.qkv_width, c, packed.qkv)
    layer("attn.proj", c, config.attention_width, packed.out)
    layer("mlp.fc", hidden, c, packed.fc, *([packed.gates] if config.gated else []))
    layer("mlp.proj", c, hidden, packed.proj)
    result["wte"] = Packed((packed.embedding,), (config.vocab_size,), c)
    if config.previous_embedding:
        result[PREVIOUS] = Packed((packed.previous,), (config.vocab_size,), c)
    for i, values in zip(config.value_layers, packed.values, strict=True):
        kv = config.kv_heads * config.head_size
        result[f"blocks.{i}.values.w"] = Packed((values,), (config.vocab_size,), kv)
    if not config.tied:
        result["head.w"] = Packed((packed.head,), (config.vocab_size,), c)
    return result


TOKENS, LENGTH = 32768, 512  # most tokens of text, and tokens of a sequence
ROOM = 3 << 30  # bytes of activations; a large model reads fewer tokens
DAMPING = 0.01  # part of H's mean diagonal that is added to the diagonal, for inputs that rarely occur


def calibrated(path: Path, text: Path) -> dict[str, Quantised]:
    """Return the int4 matrices by name, rounded by GPTQ for the activations of this text."""
    kernels = _Rounding()
    model, about = load_model(path, kernels, SerialComm())
    length = min(LENGTH, model.config.seq_len)
    if about.tokenizer is None:
        raise DataError(f"{path} has no tokenizer to read text with")
    row = 4 * sum(activation_widths(model.config).values())
    most = min(TOKENS, max(length, ROOM // (2 * row)))
    tokens = about.tokenizer.encode(read_text(text))[:most]
    if len(tokens) < length:
        raise DataError(
            f"{text} has only {len(tokens)} tokens; at least {length} are required, ideally {most:,}"
        )
    rows = len(tokens) // length
    names = [spec.name for spec in model.layout.specs if bits_of(spec, "int4") == 4]
    kernels.matrices = {name: model.params[name] for name in names}
    twice = np.tile(np.array(tokens[: rows * length]), 2)
    Pass(model, 2 * rows, length, training=False).forward(twice)
    return kernels.found


class _Rounding(CpuKernels):
    """Kernels that round each matrix in place when its inputs arrive: first exact, then rounded ones."""

    def __init__(self) -> None:
        super().__init__("float32", 1)  # one thread, so that all inputs arrive in one call
        self.matrices: dict[str, Array] = {}  # matrices to round
        self.found: dict[str, Quantised] = {}

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        name = next((name for name, w in self.matrices.items() if w is wb.w), None)
        if name is None or name in self.found:
            super().linear(y, x, wb, onto)
            return
        half = len(x) // 2
        super().linear(y[:half], x[:half], wb, None if onto is None else onto[:half])
        self.found[name] = result = round_for(*moved(wb.w, x[:half], x[half:]))
        wb.w[...] = restored(result)
        super().linear(y[half:], x[half:], wb, None if onto is None else onto[half:])


def moved(w: Floats2d, exact: Floats2d, inputs: Floats2d) -> tuple[Floats2d, Floats2d]:
    """Return the matrix that best maps `inputs` to w's outputs for `exact`, and H of `inputs`."""
    h = inputs.T @ inputs
    damped, crossed = (part + _damping(h) * np.eye(len(h)) for part in (h, inputs.T @ exact))
    return (np.linalg.solve(damped, crossed) @ w.T).T.astype(np.float32), h


def round_for(w: Floats2d, products: Floats2d) -> Quantised:
    """Round a matrix (n, k) to int4, given the sum of the products of its inputs (k, k).

    First the scales are chosen; errors that other columns cannot compensate weigh more. Then columns are
    rounded, the largest inputs first.
    """
    k = w.shape[1]
    h = products.astype(np.float64)
    h[np.diag_indices(k)] += _damping(h)
    costs = 1 / np.diag(np.linalg.inv(h))
    result = rounded(w, 4, 1, (costs / costs.max()).astype(np.float32))
    order = np.argsort(-np.diag(h), kind="stable")
    scales = np.repeat(from_bfloat16(result.scales), BLOCKS[4], axis=1)[:, order]
    upper = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T.astype(np.float32)
    left = np.ascontiguousarray(w[:, order])
    for first in range(0, k, BLOCKS[4]):
        last = min(first + BLOCKS[4], k)
        errors = np.empty((len(w), last - first), np.float32)
        for j in range(first, last):
            result.q[:, order[j]] = q = nearest(left[:, j], scales[:, j])
            errors[:, j - first] = (left[:, j] - q * scales[:, j]) / upper[j, j]
            left[:, j:last] -= np.outer(errors[:, j - first], upper[j, j:last])
        left[:, last:] -= errors @ upper[first:last, last:]
    return result


def _damping(h: Array) -> Any:
    return DAMPING * np.trace(h) / len(h) or 1.0

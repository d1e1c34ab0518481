"""Parameters of a model and FLOPs per token, counted from the shapes of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from distgpt.core.model.layers import Linear
from distgpt.core.model.memory import PREVIOUS
from distgpt.core.model.model import Architecture

# Kinds in the order of a forward pass, by a part of the name. The first match counts.
KINDS = {
    "embedding": "wte",
    "previous embedding": PREVIOUS,
    "value embeddings": ".values.",
    "positions": "wpe",
    "attention": ".attn.",
    "MLP": ".mlp.",
    "norms": "norm",
    "output layer": "head.",
}
BACKWARD = 2  # times the forward FLOPs: gradients of a matmul's input and of its weights (or k, or v)


def matmul_flops(rows: int, weights: int) -> float:
    """Return the FLOPs of x (rows, n) times w (m, n) with m·n weights, or of either gradient."""
    return 2.0 * rows * weights


def attention_flops(elements: int, seq_len: int, window: int = 0) -> float:
    """Return causal attention's FLOPs: two products with (T + 1) / 2 tokens on average, fewer with a window.

    y has N·C `elements`.
    """
    before = max(0, seq_len - window) if window else 0  # rows that see only a window
    seen = (seq_len * (seq_len + 1) - before * (before + 1)) / (2 * seq_len)
    return 4.0 * elements * seen


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by kind, without `padding`: rows of the embedding and output layer without a token."""

    kinds: dict[str, int]
    padding: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Operations:
    """FLOPs of the matmuls of one token in the forward pass, on average. Other operations are negligible.

    Padding and recomputation in the backward pass are not counted.
    """

    layers: int
    head: int
    attention: int

    @property
    def forward(self) -> int:
        return self.layers + self.head + self.attention

    @property
    def backward(self) -> int:
        return BACKWARD * self.forward


def parameters(model: Architecture) -> Parameters:
    config = model.config
    kinds = dict.fromkeys(KINDS, 0)
    for spec in model.layout.specs:
        kinds[next(kind for kind, sign in KINDS.items() if sign in spec.name)] += spec.size
    each = (config.padded_vocab - config.vocab_size) * config.n_embd
    padding = {"embedding": each, "output layer": 0 if config.tied else each}
    padding["previous embedding"] = each if config.previous_embedding else 0
    values = [block.values for block in model.blocks if block.values]
    padding["value embeddings"] = sum(each * part.shape[1] // config.n_embd for part in values)
    for kind, size in padding.items():
        kinds[kind] -= size
    return Parameters({kind: size for kind, size in kinds.items() if size}, sum(padding.values()))


def operations(model: Architecture) -> Operations:
    config = model.config
    weights = (prod(p.shape) for block in model.blocks for p in block.parts if isinstance(p, Linear))
    windows = [block.window for block in model.blocks]
    return Operations(
        layers=int(matmul_flops(1, sum(weights))),
        head=int(matmul_flops(1, config.vocab_size * config.n_embd)),
        attention=int(sum(attention_flops(config.attention_width, config.seq_len, w) for w in windows)),
    )

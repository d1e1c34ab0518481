"""Parameters of a model and floating-point operations of a token, counted from the shapes of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from distgpt.model.layers import Linear
from distgpt.model.model import Architecture

# In the order of a forward pass; a tensor is of the first kind whose sign its name has.
KINDS = {
    "embedding": "wte",
    "positions": "wpe",
    "attention": ".attn.",
    "MLP": ".mlp.",
    "norms": "norm",
    "output layer": "head.",
}
BACKWARD = (
    2  # times the forward products: one for the input's gradient, one for the weights' (or k's, or v's)
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """`padding` are rows of the embedding and the output layer that stand for no word, not in `kinds`."""

    kinds: dict[str, int]
    padding: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Operations:
    """Of the matrix products that one token takes on average in the forward pass; others hardly count.

    A product of (n, k) and (k, m) is 2nkm of them.
    Padding, and what a backward pass computes again, is left out.
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
    padded = ["embedding"] if config.tied else ["embedding", "output layer"]
    for kind in padded:
        kinds[kind] -= each
    return Parameters({kind: size for kind, size in kinds.items() if size}, each * len(padded))


def operations(model: Architecture) -> Operations:
    """Token t of T attends to the t there are so far, (T + 1) / 2 on average, in two products of width C."""
    config = model.config
    weights = (prod(p.shape) for block in model.blocks for p in block.parts if isinstance(p, Linear))
    return Operations(
        layers=2 * sum(weights),
        head=2 * config.vocab_size * config.n_embd,
        attention=config.n_layer * 2 * config.n_embd * (config.seq_len + 1),
    )

"""microgpt in plain Python, which computes one number at a time.

Weights are floats, or objects with exp(), log() and relu(), which may record gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Vector = list[Any]
Weights = Mapping[str, list[Vector]]  # matrices, with the parameter names of distgpt's models


def exp(x: Any) -> Any:
    return math.exp(x) if isinstance(x, float) else x.exp()


def log(x: Any) -> Any:
    return math.log(x) if isinstance(x, float) else x.log()


def relu(x: Any) -> Any:
    return max(x, 0.0) if isinstance(x, float) else x.relu()


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings that do not follow from the weights."""

    n_layer: int
    n_head: int
    eps: float = 1e-5


def linear(x: Vector, w: list[Vector]) -> Vector:
    return [dot(row, x) for row in w]


def dot(a: Vector, b: Vector) -> Any:
    return sum(x * y for x, y in zip(a, b, strict=True))


def add(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def rms_norm(x: Vector, eps: float) -> Vector:
    scale = (dot(x, x) * (1 / len(x)) + eps) ** -0.5
    return [each * scale for each in x]


def softmax(scores: Vector) -> Vector:
    top = max(map(float, scores))
    parts = [exp(score - top) for score in scores]
    share = sum(parts) ** -1.0
    return [part * share for part in parts]


def attend(query: Vector, keys: list[Vector], values: list[Vector], n_head: int) -> Vector:
    size, mixed = len(query) // n_head, []
    for head in range(n_head):
        own = slice(head * size, (head + 1) * size)
        q = [each * size**-0.5 for each in query[own]]
        shares = softmax([dot(q, key[own]) for key in keys])
        mixed += [dot(shares, list(column)) for column in zip(*(value[own] for value in values), strict=True)]
    return mixed


def logits(weights: Weights, shape: Shape, tokens: Sequence[int]) -> Iterator[Vector]:
    """After each token, yield the scores of the next token."""
    keys: list[list[Vector]] = [[] for _ in range(shape.n_layer)]
    values: list[list[Vector]] = [[] for _ in range(shape.n_layer)]
    for position, token in enumerate(tokens):
        x = rms_norm(add(weights["wte"][token], weights["wpe"][position]), shape.eps)
        for i in range(shape.n_layer):
            q, k, v = thirds(linear(rms_norm(x, shape.eps), weights[f"blocks.{i}.attn.qkv.w"]))
            keys[i].append(k)
            values[i].append(v)
            x = add(
                x, linear(attend(q, keys[i], values[i], shape.n_head), weights[f"blocks.{i}.attn.proj.w"])
            )
            hidden = linear(rms_norm(x, shape.eps), weights[f"blocks.{i}.mlp.fc.w"])
            x = add(x, linear([relu(each) for each in hidden], weights[f"blocks.{i}.mlp.proj.w"]))
        yield linear(x, weights["head.w"])


def thirds(x: Vector) -> tuple[Vector, Vector, Vector]:
    n = len(x) // 3
    return x[:n], x[n : 2 * n], x[2 * n :]


def loss(weights: Weights, shape: Shape, tokens: Sequence[int]) -> Any:
    """Return the sum of -log p over all tokens except the first."""
    scores = logits(weights, shape, tokens[:-1])
    chances = [softmax(each)[target] for each, target in zip(scores, tokens[1:], strict=True)]
    return sum(log(chance) for chance in chances) * -1.0


def mean_loss(weights: Weights, shape: Shape, sequences: Sequence[Sequence[int]]) -> float:
    total = sum(loss(weights, shape, tokens) for tokens in sequences)
    return float(total) / sum(len(tokens) - 1 for tokens in sequences)

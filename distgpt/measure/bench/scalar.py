"""microgpt in plain Python: one number at a time, nothing imported that computes with more than one.

Where a weight is a float, the model below computes floats. Where it is a Number, the same lines leave a trail
behind them, along which `gradients` walks back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Vector = list[Any]  # of floats, or of Numbers
Weights = Mapping[str, list[Vector]]  # matrices, by the names that distgpt's own models give them


class Number:
    """A value, what it was computed from, and its slope along each of these."""

    __slots__ = ("gradient", "sources", "value")

    def __init__(self, value: float, *sources: tuple[Number, float]) -> None:
        self.value, self.sources, self.gradient = value, sources, 0.0

    def __add__(self, other: Number | float) -> Number:
        if isinstance(other, Number):
            return Number(self.value + other.value, (self, 1.0), (other, 1.0))
        return Number(self.value + other, (self, 1.0))

    def __mul__(self, other: Number | float) -> Number:
        if isinstance(other, Number):
            return Number(self.value * other.value, (self, other.value), (other, self.value))
        return Number(self.value * other, (self, other))

    def __pow__(self, power: float) -> Number:
        return Number(self.value**power, (self, power * self.value ** (power - 1)))

    def __sub__(self, other: Number | float) -> Number:
        return self + other * -1.0

    __radd__, __rmul__ = __add__, __mul__


def exp(x: Any) -> Any:
    if not isinstance(x, Number):
        return math.exp(x)
    e = math.exp(x.value)
    return Number(e, (x, e))


def log(x: Any) -> Any:
    return Number(math.log(x.value), (x, 1 / x.value)) if isinstance(x, Number) else math.log(x)


def relu(x: Any) -> Any:
    if not isinstance(x, Number):
        return max(x, 0.0)
    return Number(max(x.value, 0.0), (x, float(x.value > 0)))


def backward(result: Number) -> None:
    """Give every number that `result` came from its gradient, adding to what it has."""
    order: list[Number] = []
    seen: set[int] = set()
    path = [(result, iter(result.sources))]  # a stack of our own: the trail is longer than Python's
    while path:
        number, rest = path[-1]
        following = next((source for source, _ in rest if id(source) not in seen), None)
        if following is None:
            order.append(number)
            path.pop()
        else:
            seen.add(id(following))
            path.append((following, iter(following.sources)))
    result.gradient = 1.0
    for number in reversed(order):
        for source, slope in number.sources:
            source.gradient += slope * number.gradient


# -- the model


@dataclass(frozen=True, slots=True)
class Shape:
    """What the weights alone do not tell."""

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
    top = max(score.value if isinstance(score, Number) else score for score in scores)
    parts = [exp(score - top) for score in scores]
    share = sum(parts) ** -1.0
    return [part * share for part in parts]


def attend(query: Vector, keys: list[Vector], values: list[Vector], n_head: int) -> Vector:
    """Every head on its own stretch of the vectors, over all positions there are so far."""
    size, mixed = len(query) // n_head, []
    for head in range(n_head):
        own = slice(head * size, (head + 1) * size)
        q = [each * size**-0.5 for each in query[own]]
        shares = softmax([dot(q, key[own]) for key in keys])
        mixed += [dot(shares, list(column)) for column in zip(*(value[own] for value in values), strict=True)]
    return mixed


def logits(weights: Weights, shape: Shape, tokens: Sequence[int]) -> Iterator[Vector]:
    """After each token in turn, the scores of all tokens that could be next."""
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
    """The sum of -log p over all tokens but the first, each predicted from those before it."""
    scores = logits(weights, shape, tokens[:-1])
    chances = [softmax(each)[target] for each, target in zip(scores, tokens[1:], strict=True)]
    return sum(log(chance) for chance in chances) * -1.0


def mean_loss(weights: Weights, shape: Shape, sequences: Sequence[Sequence[int]]) -> float:
    """Over all predictions in all sequences."""
    total = sum(loss(weights, shape, tokens) for tokens in sequences)
    return float(total) / sum(len(tokens) - 1 for tokens in sequences)


# -- its training


def gradients(weights: Weights, shape: Shape, tokens: Sequence[int]) -> tuple[float, dict[str, list[Vector]]]:
    """The mean loss of one sequence, and its gradients by the names of the weights."""
    numbers = {name: [[Number(x) for x in row] for row in rows] for name, rows in weights.items()}
    mean = loss(numbers, shape, tokens) * (1 / (len(tokens) - 1))
    backward(mean)
    return mean.value, {name: [[x.gradient for x in row] for row in rows] for name, rows in numbers.items()}


class Adam:
    """With bias correction, at a rate that falls in a straight line to 0 after `steps`."""

    def __init__(self, steps: int, lr: float = 0.01, beta1: float = 0.85, beta2: float = 0.99) -> None:
        self.steps, self.lr, self.beta1, self.beta2, self.eps = steps, lr, beta1, beta2, 1e-8
        self.m: dict[tuple[str, int, int], float] = {}
        self.v: dict[tuple[str, int, int], float] = {}

    def update(self, weights: Weights, slopes: Weights, step: int) -> None:
        """Step 0, 1, …"""
        rate = self.lr * (1 - step / self.steps)
        for name, rows in weights.items():
            for i, row in enumerate(rows):
                for j in range(len(row)):
                    row[j] -= rate * self._direction((name, i, j), slopes[name][i][j], step + 1)

    def _direction(self, place: tuple[str, int, int], g: float, turn: int) -> float:
        m = self.m[place] = self.beta1 * self.m.get(place, 0.0) + (1 - self.beta1) * g
        v = self.v[place] = self.beta2 * self.v.get(place, 0.0) + (1 - self.beta2) * g * g
        m, v = m / (1 - self.beta1**turn), v / (1 - self.beta2**turn)
        return float(m / (math.sqrt(v) + self.eps))


def train(weights: Weights, shape: Shape, sequences: Sequence[Sequence[int]], optimizer: Adam) -> list[float]:
    """One sequence a step; changes the weights in place and gives the losses before each change."""
    losses = []
    for step, tokens in enumerate(sequences):
        mean, slopes = gradients(weights, shape, tokens)
        optimizer.update(weights, slopes, step)
        losses.append(mean)
    return losses

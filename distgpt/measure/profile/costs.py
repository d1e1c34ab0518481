"""What each operation has to compute and to move, counted from the arrays it is called with.

Products count as 2nkm operations, causal attention as the pairs there are, as in `counts.py`; what a backward
pass computes again is no work. Bytes are those of every array read or written, once: what a product moves is
counted too, but not what it is held against. Entries have the parameters of the operation of their name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distgpt.kernels.api import Array


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations of products, and bytes."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def _moved(*arrays: Array | None) -> float:
    return float(sum(array.nbytes for array in arrays if array is not None))


def put(array: Array, host: Any) -> Cost:
    return Cost(0, _moved(array))


def round_(low: Array, wide: Array) -> Cost:
    return Cost(0, _moved(low, wide))


def zero(x: Array) -> Cost:
    return Cost(0, _moved(x))


def add(y: Array, a: Array, b: Array) -> Cost:
    return Cost(0, _moved(y, a, b))


def embed(x: Array, tokens: Array, wte: Array, wpe: Array | None, seq_len: int, start: Array | None) -> Cost:
    rows = 1 if wpe is None else 2
    return Cost(0, _moved(x, tokens) + rows * x.size * wte.itemsize)


def embed_backward(dwte: Array, dwpe: Array | None, dx: Array, tokens: Array, seq_len: int) -> Cost:
    places = 0 if dwpe is None else 2 * seq_len * dx.shape[1] * dwpe.itemsize
    return Cost(0, _moved(dx, tokens) + 2 * dx.size * dwte.itemsize + places)


def add_norm(
    y: Array,
    s: Array,
    mean: Array | None,
    rstd: Array,
    x: Array,
    r: Array | None,
    w: Array | None,
    b: Array | None,
    eps: float,
) -> Cost:
    return Cost(0, _moved(y, mean, rstd, x, w, b) + (0 if r is None else _moved(r, s)))


def norm_backward(
    dx: Array,
    y: Array | None,
    partial: Array | None,
    dy: Array,
    dres: Array | None,
    s: Array,
    mean: Array | None,
    rstd: Array,
    w: Array | None,
    b: Array | None,
) -> Cost:
    return Cost(0, _moved(dx, y, partial, dy, dres, s, mean, rstd, w, b))


def norm_backward_weights(
    dw: Array,
    db: Array | None,
    partial: Array | None,
    dy: Array,
    s: Array,
    mean: Array | None,
    rstd: Array,
    accumulate: bool,
) -> Cost:
    """Where there are partial sums, the rows themselves are not read again."""
    read = _moved(dy, s, mean, rstd) if partial is None else _moved(partial)
    return Cost(0, read + (1 + accumulate) * _moved(dw, db))


def linear(y: Array, x: Array, w: Array, b: Array | None) -> Cost:
    return Cost(2.0 * x.size * len(w), _moved(y, x, w, b))


def linear_backward(dx: Array, dy: Array, w: Array) -> Cost:
    return Cost(2.0 * dy.size * w.shape[1], _moved(dx, dy, w))


def linear_backward_weights(dw: Array, db: Array | None, dy: Array, x: Array, accumulate: bool) -> Cost:
    return Cost(2.0 * x.size * len(dw), _moved(dy, x) + (1 + accumulate) * _moved(dw, db))


def linear_act(y: Array, pre: Array, x: Array, w: Array, b: Array | None, act: str) -> Cost:
    return linear(pre, x, w, b) + act_alone(y, pre, x, w, b, act)


def act_alone(y: Array, pre: Array, x: Array, w: Array, b: Array | None, act: str) -> Cost:
    return Cost(0, _moved(y, pre))


def linear_backward_act(
    dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool
) -> Cost:
    return linear_backward(y, dy, w) + backward_act_alone(dpre, y, dy, w, pre, act, again)


def backward_act_alone(dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool) -> Cost:
    return Cost(0, _moved(dpre, y, pre) + (_moved(y) if again else 0))


def rope(
    qkv: Array, cos: Array, sin: Array, n_head: int, seq_len: int, start: Array | None, inverse: bool
) -> Cost:
    """q and k, two thirds of the rows, are read and written."""
    return Cost(0, 2 * _moved(qkv) * 2 / 3)


def attention(y: Array, lse: Array, qkv: Array, seq_len: int) -> Cost:
    """Each row attends to (T + 1) / 2 rows on average, in two products."""
    return Cost(2.0 * y.size * (seq_len + 1), _moved(y, lse, qkv))


def attention_backward(dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int) -> Cost:
    return Cost(4.0 * y.size * (seq_len + 1), _moved(dqkv, dy, y, lse, qkv))


def attention_cached(y: Array, cache: Array, qkv: Array, start: Array) -> Cost:
    """Of the whole cache: how much of it is filled, only the device knows."""
    new = len(y) // cache.shape[1]
    return Cost(2.0 * new * cache.size, _moved(y, qkv, cache))


def linear_cross_entropy(
    losses: Array,
    dx: Array | None,
    dw: Array | None,
    x: Array,
    w: Array,
    targets: Array,
    logits: Array,
    vocab: int,
    scale: float,
    accumulate: bool,
) -> Cost:
    """Padding counts where the words do: not at all."""
    n, width = x.shape
    product = Cost(2.0 * n * vocab * width, _moved(x) + (n + width) * vocab * x.itemsize)
    total = cross_entropy_alone(losses, dx, dw, x, w, targets, logits, vocab, scale, accumulate) + product
    for gradient in (dx, dw):
        total += Cost() if gradient is None else product
    return total


def cross_entropy_alone(
    losses: Array,
    dx: Array | None,
    dw: Array | None,
    x: Array,
    w: Array,
    targets: Array,
    logits: Array,
    vocab: int,
    scale: float,
    accumulate: bool,
) -> Cost:
    """The scores are read, and their gradients written in their place."""
    passes = 1 if dx is None else 2
    return Cost(0, _moved(losses, targets) + passes * float(len(x) * vocab) * x.itemsize)


def sum_(total: Array, x: Array, scale: float, accumulate: bool) -> Cost:
    return Cost(0, _moved(x))


def sum_squares(total: Array, g: Array) -> Cost:
    return Cost(0, _moved(g))


def adamw(
    p: Array,
    low: Array | None,
    m: Array,
    v: Array,
    g: Array,
    runs: Array,
    norm: Array,
    knobs: Array,
    beta1: float,
    beta2: float,
    eps: float,
) -> Cost:
    return Cost(0, 2 * _moved(p, m, v) + _moved(g, low))


def fill(step: int, rows: slice, x_out: Array, y_out: Array) -> Cost:
    return Cost(0, _moved(x_out, y_out))


def transfer(array: Array) -> Cost:
    return Cost(0, _moved(array))


def wait(array: Array) -> Cost:
    return Cost()


COSTS: dict[str, Callable[..., Cost]] = {
    "put": put,
    "round": round_,
    "zero": zero,
    "add": add,
    "embed": embed,
    "embed_backward": embed_backward,
    "add_norm": add_norm,
    "norm_backward": norm_backward,
    "norm_backward_weights": norm_backward_weights,
    "linear": linear,
    "linear_backward": linear_backward,
    "linear_backward_weights": linear_backward_weights,
    "linear_act": linear_act,
    "linear_backward_act": linear_backward_act,
    "rope": rope,
    "attention": attention,
    "attention_backward": attention_backward,
    "attention_cached": attention_cached,
    "linear_cross_entropy": linear_cross_entropy,
    "sum": sum_,
    "sum_squares": sum_squares,
    "adamw": adamw,
}
# Of operations whose products are operations too, and were measured apart: what is left of them.
ALONE: dict[str, Callable[..., Cost]] = {
    "linear_act": act_alone,
    "linear_backward_act": backward_act_alone,
    "linear_cross_entropy": cross_entropy_alone,
}
# What is no operation of the vocabulary, but measured like one.
OTHERS: dict[str, Callable[..., Cost]] = {"fill": fill, "transfer": transfer, "wait": wait}

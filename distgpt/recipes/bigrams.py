"""Initial weights that predict each token from the previous one, learned from pair counts.

While a model's layers add nothing, it computes softmax(head · norm(wte[a])) for the token after a. So the
embedding and output layer can be learned without the layers, and from counts instead of tokens. A pass over
all pairs costs V² products of width C, for any length of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.ops.api import Array
from distgpt.recipes.scaling import PAIR_ROWS

MOST_TOKENS = 1 << 24  # tokens to count
MOST_ROWS = PAIR_ROWS  # the most frequent tokens are learned; the others keep random weights
ROWS = 256  # per task
# Fraction of the rows, and number of steps. The output layer learns from frequent tokens first.
PHASES = ((0.25, 12), (0.5, 6), (1.0, 9))
EMBEDDING_LR, BETA1, BETA2, EPS = 0.3, 0.7, 0.9, 1e-12
HEAD_LR = 5.0  # divided by the width, since a logit is a sum over it


class PairWeights:
    """Initial weights learned from pair counts (core/train/setup.py)."""

    note = "initial weights: computed from counts of adjacent token pairs in the text"
    tokens = MOST_TOKENS

    def learn(self, tokens: Array, weights: Mapping[str, Array], config: ModelConfig, threads: int) -> None:
        vocab = config.vocab_size
        learn_bigrams(tokens, weights["wte"][:vocab], weights["head.w"][:vocab], config.centred, threads)


PAIRS = PairWeights()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts of pairs (token, next token), by token in order of frequency."""

    order: Array  # (V,), the most frequent token first
    frequency: Array  # (V,), count of pairs that start with each token, in that order
    starts: Array  # (V + 1,), index of a token's first pair
    first: Array
    second: Array
    count: Array

    @classmethod
    def of(cls, tokens: Array, vocab_size: int) -> Pairs:
        frequency = np.bincount(tokens[:-1], minlength=vocab_size)
        order = np.argsort(-frequency, kind="stable")
        place = np.empty(vocab_size, np.int64)
        place[order] = np.arange(vocab_size)
        keys, count = np.unique(place[tokens[:-1]] * vocab_size + place[tokens[1:]], return_counts=True)
        first, second = np.divmod(keys, vocab_size)
        starts = np.searchsorted(first, np.arange(vocab_size + 1))
        return cls(
            order, frequency[order].astype(np.float32), starts, first, second, count.astype(np.float32)
        )


def learn_bigrams(tokens: Array, embedding: Array, head: Array, centred: bool, threads: int) -> None:
    """Train embedding and head (V, C) in place, starting from their values.

    `centred`: the norm between them subtracts the mean. Results do not depend on the number of threads.
    """
    from distgpt.core.cpu.matmul.blas import single_threaded_blas  # a slow import

    single_threaded_blas()  # stages on GPUs have not done so; the pool has the threads
    pairs = Pairs.of(tokens, len(embedding))
    learned = min(MOST_ROWS, int(np.count_nonzero(pairs.frequency)))
    if not learned:
        return
    e, h = (weights[pairs.order].astype(np.float32) for weights in (embedding, head))
    steps = [max(1, round(part * learned)) for part, count in PHASES for _ in range(count)]
    embeddings, outputs = Adam(e, EMBEDDING_LR), Adam(h, HEAD_LR / h.shape[1])
    with ThreadPoolExecutor(threads) as pool:
        for step, rows in enumerate(steps):
            de = np.zeros((rows, e.shape[1]), np.float32)
            dh = np.zeros_like(h)
            work: deque[Future[Array]] = deque()  # results are as large as the head, so few are pending
            for start in range(0, rows, ROWS):
                if len(work) > threads:
                    dh += work.popleft().result()
                part = slice(start, min(start + ROWS, rows))
                work.append(pool.submit(gradients, pairs, part, e, h, de, centred))
            while work:  # in order, so that rounding does not depend on the number of threads
                dh += work.popleft().result()
            falling = min(1.0, 2 * (1 - step / len(steps)))
            embeddings.step(de, falling)
            outputs.step(dh, falling)
    embedding[pairs.order], head[pairs.order] = e, h


def gradients(pairs: Pairs, rows: slice, e: Array, h: Array, de: Array, centred: bool) -> Array:
    """Set de[rows] to the gradient of the mean loss. Return the head's (V, C) gradient from these rows."""
    x = e[rows] - e[rows].mean(1, keepdims=True) if centred else e[rows]
    scale = 1 / np.sqrt(np.mean(x * x, 1, keepdims=True) + 1e-5)
    x = x * scale
    p = x @ h.T
    p -= p.max(1, keepdims=True)
    np.exp(p, p)
    p *= (pairs.frequency[rows] / p.sum(1))[:, None]
    here = slice(pairs.starts[rows.start], pairs.starts[rows.stop])
    p[pairs.first[here] - rows.start, pairs.second[here]] -= pairs.count[here]
    p /= pairs.frequency.sum()
    dx = p @ h
    if centred:
        dx -= dx.mean(1, keepdims=True)
    de[rows] = scale * (dx - x * np.mean(dx * x, 1, keepdims=True))
    dh: Array = p.T @ x
    return dh


class Adam:
    """Updates the first rows of a matrix, as many as the gradient has."""

    def __init__(self, weights: Array, lr: float) -> None:
        self._weights, self._lr = weights, lr
        self._m, self._v = np.zeros_like(weights), np.zeros_like(weights)
        self._steps = np.zeros((len(weights), 1), np.float32)

    def step(self, gradient: Array, falling: float) -> None:
        weights, m, v, steps = (a[: len(gradient)] for a in (self._weights, self._m, self._v, self._steps))
        steps += 1
        m += (1 - BETA1) * (gradient - m)
        v += (1 - BETA2) * (gradient * gradient - v)
        size = np.sqrt(v / (1 - BETA2**steps)) + EPS
        weights -= self._lr * falling * m / (1 - BETA1**steps) / size

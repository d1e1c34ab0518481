"""Sampling of the next token: greedy, or random with temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.generate.slots import Logits
from distgpt.core.ops.api import Array

FIRST_FEW = 256  # most likely tokens that top-p considers first
BITS = (1 << 64) - 1
ROWS = 64  # logits per column, whose maximum is compared first
BLOCK = 256  # probabilities per block sum


def choose(logits: Logits, sampling: Sampling, uniform: float, seen: Sequence[int] | Array = ()) -> int:
    """Choose a token from logits (V,) and a random number in [0, 1).

    `seen` are the earlier tokens. The repetition penalty divides their positive logits and multiplies their
    negative ones.
    """
    if not isinstance(logits, np.ndarray):
        return logits.choose(sampling, uniform)
    if sampling.repetition_penalty != 1 and len(seen):
        logits = _penalised(logits, np.asarray(seen), sampling.repetition_penalty)
    if sampling.is_greedy:
        return int(logits.argmax())
    tokens, p = candidates(logits, sampling)
    index = drawn_at(uniform, p)
    return index if tokens is None else int(tokens[index])


def drawn_at(uniform: float, p: Array) -> int:
    """Return the first index at which the cumulative sum of p exceeds uniform · Σ p.

    For speed, long arrays are summed in blocks, then only one block element by element.
    """
    if len(p) <= BLOCK:
        sums = p.cumsum(dtype=np.float64)
        return min(int(sums.searchsorted(uniform * sums[-1], side="right")), len(p) - 1)
    blocks = np.add.reduceat(p, np.arange(0, len(p), BLOCK), dtype=np.float64).cumsum()
    wanted = uniform * blocks[-1]
    block = min(int(blocks.searchsorted(wanted, side="right")), len(blocks) - 1)
    before = blocks[block - 1] if block else 0.0
    own = p[block * BLOCK : (block + 1) * BLOCK]
    sums = own.cumsum(dtype=np.float64)
    return block * BLOCK + min(int(sums.searchsorted(wanted - before, side="right")), len(own) - 1)


def candidates(logits: Array, sampling: Sampling, total: float | None = None) -> tuple[Array | None, Array]:
    """Return the candidate tokens, or None for all, and values proportional to their probabilities.

    p = softmax(logits / temperature) over the top_k most likely tokens. Keep the fewest of them that reach
    top_p together, and at least min_p times the highest p. Lower token ids win ties. `total`: Σ exp((logit -
    highest) / temperature) of all tokens, if `logits` has only the highest.
    """
    highest = logits.max()
    tokens: Array | None = None
    if 0 < sampling.top_k < len(logits):
        tokens = topk_logits(logits, sampling.top_k)
        logits = logits[tokens]
    if sampling.min_p > 0 and sampling.top_p == 1:  # few remain, so skip the other exponentials
        often = np.flatnonzero(logits >= highest + sampling.temperature * math.log(sampling.min_p))
        tokens = often if tokens is None else tokens[often]
        logits = logits[often]
    p = np.exp((logits - highest) / sampling.temperature)
    if sampling.top_p < 1:
        if total is None:
            total = p.sum(dtype=np.float64)
        first = _nucleus(p, sampling.top_p * total)
        first = first[p[first] >= sampling.min_p]
        tokens = first if tokens is None else tokens[first]
        p = p[first]
    return tokens, p


def topk_logits(logits: Array, k: int) -> Array:
    """Return the k tokens with the highest logits, highest first, sorting only these."""
    if k >= len(logits):
        return np.argsort(-logits, kind="stable")
    tokens = np.flatnonzero(logits >= _exceeded(logits, k))
    return tokens[np.argsort(-logits[tokens], kind="stable")][:k]


def _exceeded(logits: Array, k: int) -> Any:
    """Return a threshold that at least k logits reach: the k-th highest, or the k-th column maximum."""
    columns = len(logits) // ROWS
    if columns > 2 * k:
        logits = logits[: ROWS * columns].reshape(ROWS, columns).max(0)
    return np.partition(logits, len(logits) - k)[len(logits) - k]


def _nucleus(p: Array, enough: float) -> Array:
    """Return the indices of the largest p, as few as reach `enough` together."""
    few = FIRST_FEW
    while True:
        first = topk_logits(p, few)
        sums = np.cumsum(p[first], dtype=np.float64)
        if sums[-1] >= enough or few >= len(p):
            return first[: int(np.searchsorted(sums, enough)) + 1]
        few *= 8


def _penalised(logits: Array, seen: Array, penalty: float) -> Array:
    logits = logits.copy()
    of_seen = logits[seen]
    logits[seen] = np.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
    return logits


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on seed, sample and position.

    So a token's number does not depend on earlier numbers, or on other samples.
    """
    return (_mixed(_mixed(_mixed(seed) ^ choice) ^ position) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    """Mix 64 bits so that each output bit depends on all: a step of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def likelihood(logits: Logits, token: int, alternatives: int) -> Likelihood:
    """Return a token's log-probability under softmax(logits), and the most likely tokens', highest first."""
    if not isinstance(logits, np.ndarray):
        return logits.likelihood(token, alternatives)
    highest = logits.max()
    log_sum = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    result = topk_logits(logits, alternatives).tolist() if alternatives else ()
    return Likelihood(float(logits[token]) - log_sum, [(i, float(logits[i]) - log_sum) for i in result])

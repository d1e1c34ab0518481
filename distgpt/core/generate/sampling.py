"""The choice of the next token: greedy, or drawn from what temperature, top-k, top-p and min-p leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distgpt.core.generate.lanes import MOST_LIKELIEST, Draw, Likeliest
from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.ops.api import Array

FIRST_FEW = 256  # of the likeliest tokens among which top-p looks first
BITS = (1 << 64) - 1
ROWS = 64  # tokens of which only the likeliest is looked at first
BLOCK = 256  # probabilities that are added up on their own


def choose(
    scores: Array | Likeliest, sampling: Sampling, draw: float, seen: Sequence[int] | Array = ()
) -> int:
    """Choose a token by its scores (V,) and a uniform number `draw` of [0, 1).

    `seen`: the tokens so far, whose scores the repetition penalty divides where they are above 0, and
    multiplies where they are below. Of the likeliest tokens, `enough` of them, the same one is chosen; where
    the lanes drew, or summed, the same but for what rounding decides.
    """
    if isinstance(scores, Likeliest):
        return _choose_of_few(scores, sampling, draw)
    if sampling.repetition_penalty != 1 and len(seen):
        scores = _penalised(scores, np.asarray(seen), sampling.repetition_penalty)
    if sampling.is_greedy:
        return int(scores.argmax())
    tokens, p = candidates(scores, sampling)
    place = _place_of(draw, p)
    return place if tokens is None else int(tokens[place])


def enough(sampling: Sampling, alternatives: int) -> int:
    """Return how many of the likeliest tokens suffice to choose one, with what `drawing` asks for, and to
    give alternatives; 0: all are needed, as a penalty may lower any."""
    some = sampling.top_k or MOST_LIKELIEST  # these mostly hold all that top-p and min-p leave
    most = max(1 if sampling.is_greedy or _is_plain(sampling) else some, alternatives)
    return most if sampling.repetition_penalty == 1 and most <= MOST_LIKELIEST else 0


def drawing(sampling: Sampling, draw: float) -> Draw | None:
    """Return what lanes have to draw where a token is chosen by more than the likeliest tokens."""
    return None if sampling.is_greedy or sampling.top_k else Draw(sampling.temperature, draw)


def _is_plain(sampling: Sampling) -> bool:
    """Tell whether any token may be drawn."""
    return not sampling.top_k and sampling.top_p == 1 and sampling.min_p == 0


def _choose_of_few(found: Likeliest, sampling: Sampling, draw: float) -> int:
    """Choose by what lanes found; by all scores, which are fetched, where that does not reach."""
    if drawing(sampling, draw) is None:
        return int(found.tokens[choose(found.scores, sampling, draw)])
    assert found.drawn is not None, "lanes draw where a feed says how"
    if _is_plain(sampling):
        return found.drawn.token
    if found.whole is not None and not _reaches(found, sampling, found.drawn.total):
        return choose(found.whole(), sampling, draw)
    by_token = np.argsort(found.tokens)  # as in all scores, so that sums have the same order
    places, p = candidates(found.scores[by_token], sampling, found.drawn.total)
    place = _place_of(draw, p)
    return int(found.tokens[by_token[place if places is None else places[place]]])


def _reaches(found: Likeliest, sampling: Sampling, total: float) -> bool:
    """Tell whether all that top-p and min-p leave is among the likeliest."""
    scores, how = found.scores, sampling
    if how.min_p > 0 and scores[-1] < scores[0] + how.temperature * math.log(how.min_p):
        return True
    p = np.exp((scores - scores[0]) / how.temperature)
    return how.top_p < 1 and bool(p.sum(dtype=np.float64) >= how.top_p * total)


def _place_of(draw: float, p: Array) -> int:
    """Return where the running sum of p passes draw · Σ p. Many are summed by blocks, which is faster."""
    block, before, part, wanted = 0, 0.0, p, None
    if len(p) > BLOCK:
        blocks = np.add.reduceat(p, np.arange(0, len(p), BLOCK), dtype=np.float64).cumsum()
        wanted = draw * blocks[-1]
        block = min(int(blocks.searchsorted(wanted, side="right")), len(blocks) - 1)
        before = blocks[block - 1] if block else 0.0
        part = p[block * BLOCK : (block + 1) * BLOCK]
    sums = part.cumsum(dtype=np.float64)
    left = draw * sums[-1] if wanted is None else wanted - before
    return block * BLOCK + min(int(sums.searchsorted(left, side="right")), len(part) - 1)


def candidates(scores: Array, sampling: Sampling, total: float | None = None) -> tuple[Array | None, Array]:
    """The tokens that may come next (None: all), and what is proportional to their probabilities.

    p = softmax(scores / temperature) over the top_k likeliest; of these as many of the likeliest as reach
    top_p together, and at least min_p times as likely as the likeliest. Equal scores count by their token.
    `total`: Σ exp((scores - highest) / temperature) of all tokens, where these are only the likeliest.
    """
    how, top = sampling, scores.max()
    tokens = likeliest(scores, how.top_k) if 0 < how.top_k < len(scores) else None
    if how.min_p > 0 and how.top_p == 1:  # few are left: no exponentials of the others
        some = scores if tokens is None else scores[tokens]
        often = np.flatnonzero(some >= top + how.temperature * math.log(how.min_p))
        tokens = often if tokens is None else tokens[often]
    p = np.exp(((scores if tokens is None else scores[tokens]) - top) / how.temperature)
    if how.top_p < 1:
        first = _nucleus(p, how.top_p * (p.sum(dtype=np.float64) if total is None else total))
        first = first[p[first] >= how.min_p]
        tokens, p = first if tokens is None else tokens[first], p[first]
    return tokens, p


def likeliest(scores: Array, k: int) -> Array:
    """The k tokens with the highest scores, in that order. Sorts only them."""
    few = k < len(scores)
    tokens = np.flatnonzero(scores >= _exceeded(scores, k)) if few else np.arange(len(scores))
    return tokens[np.argsort(-scores[tokens], kind="stable")][:k]


def _exceeded(scores: Array, k: int) -> Any:
    """A score that at least k reach, and not many more: the k-th highest, or that of columns' maxima."""
    columns = len(scores) // ROWS
    if columns > 2 * k:
        scores = scores[: ROWS * columns].reshape(ROWS, columns).max(0)
    return np.partition(scores, len(scores) - k)[len(scores) - k]


def _nucleus(p: Array, enough: float) -> Array:
    """Places of the fewest of the largest p that reach `enough` together."""
    few = FIRST_FEW
    while True:
        first = likeliest(p, few)
        sums = np.cumsum(p[first], dtype=np.float64)
        if sums[-1] >= enough or few >= len(p):
            return first[: int(np.searchsorted(sums, enough)) + 1]
        few *= 8


def _penalised(scores: Array, seen: Array, penalty: float) -> Array:
    scores = scores.copy()
    of_seen = scores[seen]
    scores[seen] = np.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
    return scores


def uniform(seed: int, choice: int, position: int) -> float:
    """A random number of [0, 1) that belongs to a seed, a sample of a request and a place in its text.

    So what is drawn does not depend on what was drawn before, or for others.
    """
    return (_mixed(_mixed(_mixed(seed) ^ choice) ^ position) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    """A permutation of 64 bits, each of which depends on all before: a step of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def likelihood(scores: Array | Likeliest, token: int, alternatives: int) -> Likelihood:
    """Return a token's log-probability by softmax(scores), and those of the likeliest, highest first."""
    if isinstance(scores, Likeliest):
        pairs = [(int(i), float(x) - scores.log_sum) for i, x in zip(*scores[:2], strict=True)]
        return Likelihood(_score_of(token, scores) - scores.log_sum, pairs[:alternatives])
    top = scores.max()
    log_sum = float(top) + math.log(np.exp(scores - top).sum(dtype=np.float64))
    found = likeliest(scores, alternatives).tolist() if alternatives else ()
    return Likelihood(float(scores[token]) - log_sum, [(i, float(scores[i]) - log_sum) for i in found])


def _score_of(token: int, found: Likeliest) -> float:
    if found.drawn is not None and found.drawn.token == token:
        return found.drawn.score
    (places,) = np.nonzero(found.tokens == token)
    if len(places) or found.whole is None:
        return float(found.scores[places[0]])
    return float(found.whole()[token])  # chosen by all scores

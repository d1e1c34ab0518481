"""Logits that stay on a GPU: the likeliest tokens, what was drawn there, and the choice by these.

The host needs few numbers of them; all logits of a token are more than 100 KB, too much to copy for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.generate.sampling import candidates, choose, drawn_at
from distgpt.core.generate.slots import Choice
from distgpt.core.ops.api import Array

MOST = 64  # of the likeliest tokens that are found


class Draw(NamedTuple):
    """How to draw a token from all."""

    temperature: float
    uniform: float  # a number of [0, 1)


class Drawn(NamedTuple):
    """The token that was drawn, and what its probability is made of."""

    token: int
    logit: float
    total: float  # Σ exp((logit - highest) / temperature) over all tokens


class Likeliest(NamedTuple):
    """`LogitsElsewhere`: the likeliest tokens in order, equal ones by token, and what probabilities need."""

    tokens: Array  # (k,)
    logits: Array  # (k,)
    log_sum: float  # log Σ exp(logits) over all tokens; NaN where one is not finite
    drawn: Drawn | None = None  # where the choice needs it
    whole: Callable[[], Array] | None = None  # all logits (V,), fetched until the next call of `feed`

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.log_sum)

    def choose(self, sampling: Sampling, uniform: float) -> int:
        """Choose as by all logits, but for what rounding decides where the device drew, or summed.

        All of them are fetched where the likeliest do not reach.
        """
        if draw_for(sampling, uniform) is None:
            return int(self.tokens[choose(self.logits, sampling, uniform)])
        assert self.drawn is not None, "slots draw where the choice needs it"
        if _is_plain(sampling):
            return self.drawn.token
        if self.whole is not None and not self._reaches(sampling, self.drawn.total):
            return choose(self.whole(), sampling, uniform)
        by_token = np.argsort(self.tokens)  # as in all logits, so that sums have the same order
        kept, p = candidates(self.logits[by_token], sampling, self.drawn.total)
        index = drawn_at(uniform, p)
        return int(self.tokens[by_token[index if kept is None else kept[index]]])

    def _reaches(self, sampling: Sampling, total: float) -> bool:
        """Tell whether all that top-p and min-p leave is among the likeliest."""
        highest, lowest = self.logits[0], self.logits[-1]
        if sampling.min_p > 0 and lowest < highest + sampling.temperature * math.log(sampling.min_p):
            return True
        p = np.exp((self.logits - highest) / sampling.temperature)
        return sampling.top_p < 1 and bool(p.sum(dtype=np.float64) >= sampling.top_p * total)

    def likelihood(self, token: int, alternatives: int) -> Likelihood:
        pairs = zip(self.tokens[:alternatives], self.logits[:alternatives], strict=True)
        likeliest = [(int(i), float(x) - self.log_sum) for i, x in pairs]
        return Likelihood(self._logit_of(token) - self.log_sum, likeliest)

    def _logit_of(self, token: int) -> float:
        if self.drawn is not None and self.drawn.token == token:
            return self.drawn.logit
        (found,) = np.nonzero(self.tokens == token)
        if len(found) or self.whole is None:
            return float(self.logits[found[0]])
        return float(self.whole()[token])  # chosen by all logits


def enough(choice: Choice | None) -> int:
    """Return how many of the likeliest tokens suffice, with what `draw_for` asks for.

    0: all logits are needed, as a penalty may lower any.
    """
    if choice is None or choice.sampling.repetition_penalty != 1:
        return 0
    sampling = choice.sampling
    some = 1
    if not (sampling.is_greedy or _is_plain(sampling)):
        some = sampling.top_k or MOST  # these mostly hold all that top-p and min-p leave
    most = max(some, choice.alternatives)
    return most if most <= MOST else 0


def draw_for(sampling: Sampling, uniform: float) -> Draw | None:
    """Return what the device has to draw where a token is chosen by more than the likeliest tokens."""
    return None if sampling.is_greedy or sampling.top_k else Draw(sampling.temperature, uniform)


def _is_plain(sampling: Sampling) -> bool:
    """Tell whether any token may be drawn."""
    return not sampling.top_k and sampling.top_p == 1 and sampling.min_p == 0

"""Lanes: sequences that grow side by side in one cache of keys and values. What the engine asks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from distgpt.core.ops.api import Array


class Draw(NamedTuple):
    """How to draw a token from all."""

    temperature: float
    uniform: float  # a number of [0, 1)


class Drawn(NamedTuple):
    """The token that was drawn, and what its probability is made of."""

    token: int
    score: float
    total: float  # Σ exp((score - highest) / temperature) over all tokens


class Feed(NamedTuple):
    """New tokens of one sequence."""

    lane: int  # which
    start: int  # how many it has so far
    tokens: Sequence[int]  # that follow: one when decoding, a chunk in prefill, a draft with prompt lookup
    scored: int  # scores are wanted after this many of the last tokens (0: none, 1: usual, all: verification)
    variant: int = 0  # of the weights, where lanes have some: they count from 1; 0: the model itself
    likeliest: int = 0  # so many of the likeliest tokens are enough to choose one; 0: all scores are wanted
    draw: Draw | None = None  # beside the likeliest, what is needed to choose from all tokens


class Likeliest(NamedTuple):
    """The likeliest of all tokens in order, equal scores by token, and what their probabilities need."""

    tokens: Array  # (k,)
    scores: Array  # (k,)
    log_sum: float  # log Σ exp(scores) over all tokens; NaN where one is not finite
    drawn: Drawn | None = None  # where a feed asks for it
    whole: Callable[[], Array] | None = None  # all scores (V,), fetched until the next feed


MOST_LIKELIEST = 64  # that a feed may ask for
# A row of scores (V,), or the likeliest, for each token scored.
Rows: TypeAlias = "Sequence[Array | Likeliest] | Array"


class Lanes(Protocol):
    """A cache for `count` sequences. What a lane holds beyond a feed's `start` is forgotten by that feed.

    What comes out for a sequence does not depend on the others: in one feed each lane occurs at most once.
    """

    count: int  # lanes
    length: int  # positions of each: the context
    can_drop: bool  # whether positions may move: not where the model has learned a vector for each
    is_exact: bool  # whether the same bits come out however a sequence is cut into feeds

    def feed(self, work: Sequence[Feed]) -> Rows:
        """float32 (Σ scored, V) on the host, in the order of `work`; V without padding.

        Where feeds ask for the likeliest, a list of rows, some of which may be `Likeliest`.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values: several samples share a prefill."""

    def drop(self, lane: int, count: int, kept: int) -> None:
        """Forget the first `count` positions, and move the `kept` behind them to the front.

        Their keys are rotated back by `count` positions, as attention sees distances alone. They still carry
        what they saw of those that went.
        """


def are_finite(rows: Rows) -> bool:
    """Tell whether all scores are, also those that stayed on the device."""
    if isinstance(rows, np.ndarray):
        return bool(np.isfinite(rows).all())
    return all(np.isfinite(row.log_sum if isinstance(row, Likeliest) else row).all() for row in rows)


def check_drop(lanes: Lanes, lane: int, count: int, kept: int) -> None:
    """Refuse what does not fit, as compiled loops do not look."""
    if not (lanes.can_drop and 0 <= lane < lanes.count and 0 <= count < count + kept <= lanes.length):
        raise ValueError(f"lane {lane} cannot keep {kept} of {lanes.length} positions behind {count}")

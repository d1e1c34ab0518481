"""Slots: each holds a sequence in one cache of keys and values. What the engine asks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.agree import broadcast, shared
from distgpt.core.comm.api import Comm
from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array

CHUNK = 256  # tokens of prompts that are computed beside the next token of the others


class Choice(NamedTuple):
    """How a token is going to be chosen, for slots that know to do most of it where the logits are."""

    sampling: Sampling
    uniform: float  # the random number of [0, 1) that draws it
    alternatives: int  # the number of likeliest tokens whose log-probabilities are asked for, too


class Feed(NamedTuple):
    """New tokens of one sequence."""

    slot: int
    start: int  # how many tokens the slot holds so far
    tokens: Sequence[int]  # that follow: one when decoding, a chunk in prefill, a draft with prompt lookup
    wanted: int  # logits are wanted after this many of the last tokens (0: none, 1: usual, all: verification)
    choice: Choice | None = None  # what alone the logits are for; None: all of them are wanted


class LogitsElsewhere(Protocol):
    """The logits of a token that stayed on a device, with what its `Choice` needs."""

    @property
    def is_finite(self) -> bool:
        """Tell whether all of them are."""

    def choose(self, sampling: Sampling, uniform: float) -> int:
        """Choose a token as `sampling.choose` does."""

    def likelihood(self, token: int, alternatives: int) -> Likelihood:
        """Return log-probabilities as `sampling.likelihood` does."""


Logits: TypeAlias = "Array | LogitsElsewhere"  # (V,), of one token
Rows: TypeAlias = "Sequence[Logits] | Array"


class Slots(Protocol):
    """A cache for `count` sequences. What a slot holds beyond a feed's `start` is forgotten by that feed.

    What comes out for a sequence does not depend on the others: in one call each slot occurs at most once.
    """

    count: int
    length: int  # positions of each: the context
    can_drop: bool  # whether positions may move: not where the model has learned a vector for each
    chunk: int  # tokens of prompts to compute at once
    is_exact: bool  # whether the same bits come out however a sequence is cut into feeds

    def feed(self, work: Sequence[Feed]) -> Rows:
        """Compute these tokens; return logits (Σ wanted, V), in the order of `work`; V without padding.

        They are float32 on the host. Where feeds name a choice, a list of rows, some of which may stay
        elsewhere.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values: several samples share a prefill."""

    def drop(self, slot: int, count: int, kept: int) -> None:
        """Forget the first `count` positions, and move the `kept` behind them to the front.

        Their keys are rotated back by `count` positions, as attention sees distances alone. They still carry
        what they saw of those that went.
        """


class SlotKind(NamedTuple):
    """A kind of slots: how to make a number of them for a model, and the bytes that one takes."""

    make: Callable[[Model, int], Slots]
    slot_bytes: Callable[[Model], int]


def are_finite(rows: Rows) -> bool:
    """Tell whether all logits are, also those that stayed on a device."""
    if isinstance(rows, np.ndarray):
        return bool(np.isfinite(rows).all())
    return all(np.isfinite(row).all() if isinstance(row, np.ndarray) else row.is_finite for row in rows)


def check_feeds(slots: Slots, work: Sequence[Feed]) -> None:
    """Refuse what does not fit, as compiled loops and a GPU's kernels trust what they get."""
    for each in work:
        fits = 0 <= each.slot < slots.count and 0 <= each.start <= slots.length - len(each.tokens)
        if not (fits and 0 <= each.wanted <= len(each.tokens)):
            raise ValueError(f"{each} does not fit {slots.count} slots of {slots.length} positions")
    if len({each.slot for each in work}) < len(work):
        raise ValueError(f"a slot occurs twice in {work}")


def check_drop(slots: Slots, slot: int, count: int, kept: int) -> None:
    """Refuse what does not fit, as compiled loops do not look."""
    if not (slots.can_drop and 0 <= slot < slots.count and 0 <= count < count + kept <= slots.length):
        raise ValueError(f"slot {slot} cannot keep {kept} of {slots.length} positions behind {count}")


# One prompt on several ranks, which average their logits of each token, as in the course project: rank 0 runs
# the engine, and the others feed what it feeds.


def on_ranks(slots: Slots, comm: Comm, act: Callable[[Slots], Any]) -> Any:
    """Return on rank 0 what `act` returns with slots whose logits are means over all ranks; None elsewhere.

    All ranks raise its DistgptError. Collective.
    """
    if comm.size == 1:
        return act(slots)
    if comm.rank != 0:
        return _follow(slots, comm)
    try:
        result = act(_Leading(slots, comm))
    except DistgptError as error:
        broadcast(comm, ("error", error))
        raise shared(error) from None
    broadcast(comm, ("end",))
    return result


class _Leading:
    """Rank 0's slots. The others learn of each call before it is made."""

    def __init__(self, own: Slots, comm: Comm) -> None:
        self._own, self._comm = own, comm
        self.count, self.length, self.can_drop = own.count, own.length, own.can_drop
        self.chunk, self.is_exact = own.chunk, own.is_exact

    def feed(self, work: Sequence[Feed]) -> Array:
        # Without the choice: it is made here, of the mean, and would take the prompt along with each token.
        work = [each._replace(choice=None) for each in work]
        broadcast(self._comm, ("feed", work))
        return _mean(self._own, work, self._comm)

    def copy(self, source: int, target: int, length: int) -> None:
        broadcast(self._comm, ("copy", source, target, length))
        self._own.copy(source, target, length)

    def drop(self, slot: int, count: int, kept: int) -> None:
        broadcast(self._comm, ("drop", slot, count, kept))
        self._own.drop(slot, count, kept)


def _follow(slots: Slots, comm: Comm) -> None:
    """Do as rank 0 does until it is done."""
    while True:
        what, *how = broadcast(comm)
        if what == "feed":
            _mean(slots, how[0], comm)
        elif what == "error":
            raise shared(how[0])
        elif what == "end":
            return
        else:
            getattr(slots, what)(*how)


def _mean(slots: Slots, work: Sequence[Feed], comm: Comm) -> Array:
    logits = np.asarray(slots.feed(work))
    comm.sum(logits)
    logits /= comm.size
    return logits

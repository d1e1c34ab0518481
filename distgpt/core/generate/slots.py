"""Slots: key-value caches for one sequence each, and their interface for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.agree import broadcast, collective_error
from distgpt.core.comm.api import Comm
from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Array

CHUNK = 256  # prompt tokens computed per step, in addition to the next tokens of other sequences


class Choice(NamedTuple):
    """Parameters for choosing a token, for slots that can choose on the device."""

    sampling: Sampling
    uniform: float  # the random number in [0, 1) that draws it
    alternatives: int  # most likely tokens whose log-probabilities are also requested


class Feed(NamedTuple):
    """New tokens of one sequence."""

    slot: int
    start: int  # tokens in the slot before
    tokens: Sequence[int]  # one when decoding, a chunk in prefill, or a draft with prompt lookup
    wanted: int  # the number of last tokens with logits (0: none, 1: usual, all: verification)
    choice: Choice | None = None  # the only use of the logits; None: return all


class LogitsElsewhere(Protocol):
    """The logits of a token that stay on a device, with everything its `Choice` needs."""

    @property
    def is_finite(self) -> bool: ...

    def choose(self, sampling: Sampling, uniform: float) -> int:
        """Choose a token as `sampling.choose` does."""

    def likelihood(self, token: int, alternatives: int) -> Likelihood:
        """Return log-probabilities as `sampling.likelihood` does."""


Logits: TypeAlias = "Array | LogitsElsewhere"  # (V,), for one token
Rows: TypeAlias = "Sequence[Logits] | Array"


class Slots(Protocol):
    """Key-value caches for `count` sequences. A feed overwrites the slot from its `start` on.

    The results of a sequence do not depend on other sequences. Each slot may occur only once per call.
    """

    count: int
    length: int  # positions per slot: the context length
    can_drop: bool  # whether positions may move; False with learned position vectors
    chunk: int  # prompt tokens to compute per step
    is_exact: bool  # whether results are bitwise identical for any split of a sequence into feeds

    def feed(self, work: Sequence[Feed]) -> Rows:
        """Compute tokens. Return logits (n, V) in the order of `work`, with n = Σ wanted and V unpadded.

        The logits are float32 on the host. If feeds have a choice, return a list of rows, which may include
        rows on a device.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values, so that samples share a prefill."""

    def drop(self, slot: int, count: int, kept: int) -> None:
        """Remove the first `count` positions and move the next `kept` to the start.

        Keys are rotated back by `count` positions, because attention depends only on distances. They still
        include information from the removed tokens.
        """


class TokensInSlots:
    """The tokens in slots, since a model with a previous embedding reads the token before a feed."""

    def __init__(self, count: int, length: int) -> None:
        self._tokens = np.zeros((count, length), np.int32)

    def before(self, feed: Feed) -> int:
        """Add a feed's tokens. Return the token before them, or 0 if there is none."""
        row = self._tokens[feed.slot]
        row[feed.start : feed.start + len(feed.tokens)] = feed.tokens
        return int(row[feed.start - 1]) if feed.start else 0

    def copy(self, source: int, target: int, length: int) -> None:
        self._tokens[target, :length] = self._tokens[source, :length]

    def drop(self, slot: int, count: int, kept: int) -> None:
        self._tokens[slot, :kept] = self._tokens[slot, count : count + kept].copy()


class SlotKind(NamedTuple):
    """A kind of slots: a factory, and the bytes per slot."""

    make: Callable[[Model, int], Slots]
    slot_bytes: Callable[[Model], int]


def are_finite(rows: Rows) -> bool:
    """Return whether all logits are finite, including logits on a device."""
    if isinstance(rows, np.ndarray):
        return bool(np.isfinite(rows).all())
    return all(np.isfinite(row).all() if isinstance(row, np.ndarray) else row.is_finite for row in rows)


def check_feeds(slots: Slots, work: Sequence[Feed]) -> None:
    """Raise a ValueError for invalid feeds, because compiled kernels do not check them."""
    for each in work:
        fits = 0 <= each.slot < slots.count and 0 <= each.start <= slots.length - len(each.tokens)
        if not (fits and 0 <= each.wanted <= len(each.tokens)):
            raise ValueError(f"{each} does not fit {slots.count} slots of {slots.length} positions")
    if len({each.slot for each in work}) < len(work):
        raise ValueError(f"a slot occurs twice in {work}")


def check_drop(slots: Slots, slot: int, count: int, kept: int) -> None:
    """Raise a ValueError for an invalid drop, because compiled loops do not check it."""
    if not (slots.can_drop and 0 <= slot < slots.count and 0 <= count < count + kept <= slots.length):
        raise ValueError(f"slot {slot} cannot drop {count} and keep {kept} of {slots.length} positions")


# One prompt on multiple ranks, which average their logits, as in the course project. Rank 0 runs the engine,
# and the other ranks feed the same tokens.


def on_ranks(slots: Slots, comm: Comm, act: Callable[[Slots], Any]) -> Any:
    """Run `act` on rank 0 with slots that average logits over ranks. Return its result there.

    Other ranks return None. All ranks raise its DistgptError. Collective.
    """
    if comm.size == 1:
        return act(slots)
    if comm.rank != 0:
        return _follow(slots, comm)
    try:
        result = act(_Leading(slots, comm))
    except DistgptError as error:
        broadcast(comm, ("error", error))
        raise collective_error(error) from None
    broadcast(comm, ("end",))
    return result


class _Leading:
    """Rank 0's slots, which broadcast each call before executing it."""

    def __init__(self, own: Slots, comm: Comm) -> None:
        self._own, self._comm = own, comm
        self.count, self.length, self.can_drop = own.count, own.length, own.can_drop
        self.chunk, self.is_exact = own.chunk, own.is_exact

    def feed(self, work: Sequence[Feed]) -> Array:
        # Rank 0 chooses from the mean. A choice would also send the whole prompt with each token.
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
    """Repeat rank 0's calls until it is done."""
    while True:
        what, *how = broadcast(comm)
        if what == "feed":
            _mean(slots, how[0], comm)
        elif what == "error":
            raise collective_error(how[0])
        elif what == "end":
            return
        else:
            getattr(slots, what)(*how)


def _mean(slots: Slots, work: Sequence[Feed], comm: Comm) -> Array:
    logits = np.asarray(slots.feed(work))
    comm.sum(logits)
    logits /= comm.size
    return logits

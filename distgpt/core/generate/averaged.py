"""One prompt on several ranks, which average their logits of each token, as in the course project.

Rank 0 runs the engine, and the others feed what it feeds: every rank computes every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.agree import broadcast, shared
from distgpt.core.comm.api import Comm
from distgpt.core.generate.slots import Feed, Slots
from distgpt.core.ops.api import Array


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

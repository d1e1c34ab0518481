"""One engine for several ranks, which average their scores of each token.

Rank 0 runs the engine, and the others feed what it feeds: every rank computes every token, as in the course
project.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.agree import shared
from distgpt.core.comm.api import Comm
from distgpt.core.generate.lanes import Feed, Lanes
from distgpt.core.ops.api import Array


def averaged(lanes: Lanes, comm: Comm, act: Callable[[Lanes], Any]) -> Any:
    """Run `act` on rank 0, with lanes whose scores are the mean over all ranks; elsewhere None. Collective.

    A DistgptError of it is raised by all ranks.
    """
    if comm.rank != 0:
        return _follow(lanes, comm)
    try:
        result = act(_Leading(lanes, comm))
    except DistgptError as error:
        broadcast(comm, ("error", error))
        raise shared(error) from None
    broadcast(comm, ("end",))
    return result


class _Leading:
    """Rank 0's lanes. The others learn of each call before it is made."""

    def __init__(self, own: Lanes, comm: Comm) -> None:
        self._own, self._comm = own, comm
        self.count, self.length, self.can_drop = own.count, own.length, own.can_drop
        self.is_exact = own.is_exact

    def feed(self, work: Sequence[Feed]) -> Array:
        broadcast(self._comm, ("feed", work))
        return _mean(self._own, work, self._comm)

    def copy(self, source: int, target: int, length: int) -> None:
        broadcast(self._comm, ("copy", source, target, length))
        self._own.copy(source, target, length)

    def drop(self, lane: int, count: int, kept: int) -> None:
        broadcast(self._comm, ("drop", lane, count, kept))
        self._own.drop(lane, count, kept)


def _follow(lanes: Lanes, comm: Comm) -> None:
    """Do as rank 0 does until it is done."""
    while True:
        what, *how = broadcast(comm)
        if what == "feed":
            _mean(lanes, how[0], comm)
        elif what == "error":
            raise shared(how[0])
        elif what == "end":
            return
        else:
            getattr(lanes, what)(*how)


def _mean(lanes: Lanes, work: Sequence[Feed], comm: Comm) -> Array:
    scores = np.asarray(lanes.feed([each._replace(likeliest=0) for each in work]))  # a mean needs all
    comm.sum(scores)
    scores /= comm.size
    return scores


def broadcast(comm: Comm, value: Any = None) -> Any:
    """Return rank 0's value on every rank. Collective."""
    return pickle.loads(comm.broadcast_bytes(pickle.dumps(value) if comm.rank == 0 else None))

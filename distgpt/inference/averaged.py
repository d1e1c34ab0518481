"""One engine for several ranks, whose scores are averaged: rank 0 runs it, the others feed what it feeds.

So every rank computes every token: the course project's way of inference. Spreading prompts is faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from distgpt.comm.agree import shared
from distgpt.comm.api import Comm
from distgpt.errors import DistgptError, error_for
from distgpt.inference.lanes import Array, Feed, Lanes


def averaged(lanes: Lanes, comm: Comm, act: Callable[[Lanes], Any]) -> Any:
    """Run `act` on rank 0, with lanes whose scores are the mean over all ranks; elsewhere None. Collective.

    A DistgptError of it is raised by all ranks.
    """
    if comm.rank != 0:
        return _follow(lanes, comm)
    try:
        result = act(_Leading(lanes, comm))
    except DistgptError as error:
        _send(comm, "error", str(error), error.exit_code)
        raise shared(error) from None
    _send(comm, "end")
    return result


class _Leading:
    """Rank 0's lanes. The others learn of each call before it is made."""

    def __init__(self, own: Lanes, comm: Comm) -> None:
        self._own, self._comm = own, comm
        self.count, self.length, self.can_drop = own.count, own.length, own.can_drop

    def feed(self, work: Sequence[Feed]) -> Array:
        _send(self._comm, "feed", [(*each[:2], list(each.tokens), each.scored) for each in work])
        return _mean(self._own, work, self._comm)

    def copy(self, source: int, target: int, length: int) -> None:
        _send(self._comm, "copy", source, target, length)
        self._own.copy(source, target, length)

    def drop(self, lane: int, count: int, kept: int) -> None:
        _send(self._comm, "drop", lane, count, kept)
        self._own.drop(lane, count, kept)


def _follow(lanes: Lanes, comm: Comm) -> None:
    """Do as rank 0 does until it is done."""
    while True:
        what, *how = json.loads(comm.broadcast_bytes(None))
        if what == "feed":
            _mean(lanes, [Feed(*each) for each in how[0]], comm)
        elif what == "copy":
            lanes.copy(*how)
        elif what == "drop":
            lanes.drop(*how)
        elif what == "error":
            raise shared(error_for(how[1])(how[0]))
        else:
            return


def _mean(lanes: Lanes, work: Sequence[Feed], comm: Comm) -> Array:
    scores = lanes.feed(work)
    comm.sum(scores)
    scores /= comm.size
    return scores


def _send(comm: Comm, *message: Any) -> None:
    comm.broadcast_bytes(json.dumps(message).encode())

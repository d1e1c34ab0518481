"""Collective decisions, errors that all ranks raise, and values gathered from all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from distgpt.core.base.errors import DistgptError, UsageError, error_for
from distgpt.core.base.formatting import numbered
from distgpt.core.comm.api import Comm

T = TypeVar("T")


def on_root(comm: Comm, decide: Callable[[], T]) -> T:
    """Run `decide` only on rank 0. Return its pickled result, or raise its DistgptError. Collective."""
    answer, error, code = None, "", 0
    if comm.rank == 0:
        try:
            answer = decide()
        except DistgptError as failure:
            error, code = str(failure), failure.exit_code
    if comm.size > 1:
        answer, error, code = broadcast(comm, (answer, error, code))
    if code:
        raise collective_error(error_for(code)(error))
    return cast(T, answer)


def on_every_rank(comm: Comm, act: Callable[[], T]) -> T:
    """Run `act` on every rank. If one raises a DistgptError, all ranks raise it. Collective."""
    if comm.size == 1:  # not shared(): a node of one rank may belong to a larger job, which it has to abort
        return act()
    complaint, code, result = "", 0, None
    try:
        result = act()
    except DistgptError as error:
        complaint, code = str(error), error.exit_code
    raise_if_any(comm, complaint, error_for(comm.allreduce_max(code)))
    return cast(T, result)


def raise_if_any(comm: Comm, complaint: str, kind: type[DistgptError] = UsageError) -> None:
    """Raise the error of any rank on all ranks; "" means success. Collective."""
    owners = ranks_by_text(gather(comm, complaint))
    if owners:
        several = len(owners) > 1 or len(next(iter(owners.values()))) < comm.size
        texts = (f"{named_ranks(ranks)}: " * several + text for text, ranks in owners.items())
        raise collective_error(kind("; ".join(texts)))


def ranks_by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the ranks of each text except "". `texts` has one per rank, in rank order."""
    owners: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            owners.setdefault(text, []).append(rank)
    return owners


def gather(comm: Comm, value: T) -> list[T]:
    """Return the pickled values of all ranks, in rank order. Collective."""
    return [pickle.loads(each) for each in gather_bytes(comm, pickle.dumps(value))]


def gather_bytes(comm: Comm, data: bytes) -> list[bytes]:
    """Return every rank's bytes, of any length, in rank order. Collective.

    Implemented with sums, so any communicator supports it.
    """
    if comm.size == 1:
        return [data]
    import numpy as np  # the command line imports this module and does not load NumPy

    ends = np.zeros(comm.size, np.int64)
    ends[comm.rank :] = len(data)
    comm.sum(ends)
    everything = np.zeros(ends[-1], np.uint8)  # each byte is nonzero on at most one rank, so no sum overflows
    begin = ends[comm.rank] - len(data)
    everything[begin : ends[comm.rank]] = np.frombuffer(data, np.uint8)
    comm.sum(everything)
    return [piece.tobytes() for piece in np.split(everything, ends[:-1])]


def named_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] → "ranks 0–2, 5"."""
    return numbered("rank", ranks)


def collective_error(error: DistgptError) -> DistgptError:
    """Mark an error as raised on every rank, so that none aborts the job."""
    error.shared = True
    return error


def broadcast(comm: Comm, value: Any = None) -> Any:
    """Return rank 0's value, which must be picklable, on every rank. Collective."""
    return pickle.loads(comm.broadcast_bytes(pickle.dumps(value) if comm.rank == 0 else None))

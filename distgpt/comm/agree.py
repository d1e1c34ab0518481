"""Verdicts that all ranks share: no rank ever leaves a collective section alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distgpt.comm.api import Comm
from distgpt.errors import DistgptError, UsageError, error_for


def on_root(comm: Comm, decide: Callable[[], Any]) -> Any:
    """Run `decide` on rank 0 alone; its JSON-able answer, or its DistgptError, reaches every rank."""
    message = None
    if comm.rank == 0:
        try:
            message = {"answer": decide()}
        except DistgptError as error:
            message = {"error": str(error), "code": error.exit_code}
    encoded = None if message is None else json.dumps(message).encode()
    verdict = json.loads(comm.broadcast_bytes(encoded))
    if "error" in verdict:
        raise shared(error_for(verdict["code"])(verdict["error"]))
    return verdict["answer"]


def refuse_anywhere(comm: Comm, complaint: str, kind: type[DistgptError] = UsageError) -> None:
    """Raise on all ranks what any of them complains of; "" is no complaint. Collective."""
    from distgpt.comm.gather import gather_bytes  # needs NumPy, which the command line does without

    owners: dict[str, list[int]] = {}
    for rank, text in enumerate(gather_bytes(comm, complaint.encode())):
        if text:
            owners.setdefault(text.decode(), []).append(rank)
    if owners:
        several = len(owners) > 1 or len(next(iter(owners.values()))) < comm.size
        told = (f"{named_ranks(ranks)}: " * several + text for text, ranks in owners.items())
        raise shared(kind("; ".join(told)))


def named_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] → "ranks 0–2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("–".join(map(str, run)) for run in runs)


def shared(error: DistgptError) -> DistgptError:
    """Mark an error that every rank arrives at, so that none waits for another."""
    error.shared = True
    return error

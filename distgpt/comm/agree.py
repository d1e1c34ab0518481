"""Verdicts that all ranks share: no rank ever leaves a collective section alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distgpt.comm.api import Comm
from distgpt.errors import DistgptError, error_for


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


def shared(error: DistgptError) -> DistgptError:
    """Mark an error that every rank arrives at, so that none waits for another."""
    error.shared = True
    return error

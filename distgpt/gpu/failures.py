"""Errors of NCCL in the main thread, in words for a line. CuPy is not needed to recognise them."""

from __future__ import annotations

import traceback

from distgpt.launch.leaving import Library

STATUS = {6: "remote error", 7: "in progress"}  # newer than those that CuPy knows


def raised(error: BaseException) -> str | None:
    """Return what NCCL has raised; None for errors of others."""
    if type(error).__name__ == "NcclError" and "nccl" in type(error).__module__:  # CuPy's
        return str(error)
    # CuPy's NcclError may not know a status, and then is a KeyError.
    where = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, KeyError) or not where or "nccl" not in where[-1][0].f_code.co_filename:
        return None
    return STATUS.get(error.args[0], f"status {error.args[0]}")


NCCL = Library(
    "NCCL",
    raised,
    blames_others=lambda what: "remote" in what.lower(),
    fails_everywhere=True,
    hint="; with NCCL_DEBUG=INFO in the environment it says why",
)

"""Flags that the ranks add up along with their gradients: which signals came, and whether saving has failed.

So all ranks know of them after the same step, without a message of their own.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from distgpt.comm.agree import on_root
from distgpt.interrupts import first_of
from distgpt.training.run import Run
from distgpt.training.step import StepResult


@dataclass(frozen=True, slots=True)
class Flags:
    """Reports of any rank, summed with a step; the same on all ranks."""

    stop: signal.Signals | None  # the signal that counts most
    has_lost_disk: bool  # rank 0 cannot save any more, and must end the run


def outgoing(run: Run) -> list[int]:
    """Return this rank's flags."""
    return [*run.guards.signals.counts(), int(run.checkpoints.fatal_error is not None)]


def summed(result: StepResult) -> Flags:
    """Return the flags of all ranks, from a step that was read."""
    *signals, disk = result.flags()
    return Flags(first_of(signals), bool(disk))


def check_disk(run: Run, has_lost_disk: bool) -> None:
    """End the run if rank 0 cannot save any more; retry a save that has failed. Collective."""
    if has_lost_disk:
        on_root(run.comm, run.checkpoints.raise_fatal)
    if run.comm.rank == 0:
        run.checkpoints.poll()

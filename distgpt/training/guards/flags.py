"""Flags that the ranks add up along with their gradients: signals, whether saving has failed, rank 0's clock.

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
    elapsed: float  # fraction of the run's time, at the end of the next step


def outgoing(run: Run) -> list[float]:
    """Return this rank's flags."""
    elapsed = run.clock.ahead() if run.comm.rank == 0 else 0.0
    return [*run.guards.signals.counts(), int(run.checkpoints.fatal_error is not None), elapsed]


def summed(result: StepResult) -> Flags:
    """Return the flags of all ranks, from a step that was read."""
    *signals, disk, elapsed = result.flags()
    return Flags(first_of(signals), bool(disk), float(elapsed))


def check_disk(run: Run, has_lost_disk: bool) -> None:
    """End the run if rank 0 cannot save any more; retry a save that has failed. Collective."""
    if has_lost_disk:
        on_root(run.comm, run.checkpoints.raise_fatal)
    if run.comm.rank == 0:
        run.checkpoints.poll()

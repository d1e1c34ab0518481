"""Votes: numbers that the ranks add up along with their gradients.

So all ranks know of them after the same step, without a message of their own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.core.base.interrupts import PendingSignals, first_of
from distgpt.core.comm.api import Comm
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.clock import Clock


@dataclass(frozen=True, slots=True)
class Heard:
    """Votes of all ranks, summed with a step; the same on all ranks."""

    stop: signal.Signals | None  # the signal that counts most
    has_lost_disk: bool  # rank 0 cannot save any more, and must end the run
    elapsed: float  # fraction of the run's time, at the end of the next step


@dataclass(frozen=True, slots=True)
class Votes:
    """Collects this rank's votes, and reads the sums.

    Their number is fixed (`FLAG_COUNT`): one more would move the cuts of an Allreduce among three or more
    ranks, and with them the rounding of the gradients.
    """

    comm: Comm
    signals: PendingSignals
    checkpoints: Checkpoints
    clock: Clock

    def mine(self) -> list[float]:
        """Return this rank's votes: one for each signal, one for a lost disk, and rank 0's clock."""
        elapsed = self.clock.ahead() if self.comm.rank == 0 else 0.0
        return [*self.signals.counts(), int(self.checkpoints.fatal_error is not None), elapsed]

    def heard(self, sums: Sequence[float]) -> Heard:
        """Return what the sums of a step say."""
        *signals, disk, elapsed = sums
        return Heard(first_of(signals), bool(disk), float(elapsed))

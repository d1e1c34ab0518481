"""When a checkpoint is due by the clock, agreed on by all ranks at a few steps that all of them know."""

from __future__ import annotations

import time

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm


class SaveTimer:
    """Rank 0 looks at its clock, and says with the answer at which step it will look again.

    It looks again after half of the steps that the time left is good for, so that a run that gets slower is
    noticed, but after no more than twice those it has seen: the first ones may be queued, not done.
    """

    def __init__(self, comm: Comm, minutes: float, step: int) -> None:
        self._comm, self._seconds = comm, 60 * minutes
        self._first = step
        self._begun = self._saved_at = time.monotonic()
        self._appointment = step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step. Collective, at the steps that were agreed on."""
        if not self._seconds or step < self._appointment:
            return False
        due, self._appointment = on_root(self._comm, lambda: self._judge(step))
        return bool(due)

    def saved(self) -> None:
        """A checkpoint was written, for whatever reason: the time begins anew."""
        self._saved_at = time.monotonic()

    def _judge(self, step: int) -> tuple[bool, int]:
        now, done = time.monotonic(), step - self._first
        left = self._seconds - (now - self._saved_at)
        if left <= 0:
            return True, step + 1
        half = left / 2 * done / max(now - self._begun, 1e-9)
        return False, step + max(1, int(min(half, 2 * done)))

"""Retention of checkpoints beside the newest: some stay for good.

Nothing here removes the newest `keep`, of which the last is whole: it was just written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import MANIFEST, MARK, is_kept, step_of


class Retention:
    """Says which checkpoints may go: an `Outdated` (core/saved/checkpoint.py).

    Whether one stays for good is decided once, when it is the newest, and not by its time, which a copy on
    another disk may not have: it is marked.
    """

    def __init__(self, t: TrainConfig) -> None:
        self._t = t

    def __call__(self, saved: Sequence[Path]) -> list[Path]:
        """Mark the newest one if it is to stay for good. Return those that may go. `saved`: newest first."""
        if saved and self._is_due(saved[0], next(filter(is_kept, saved[1:]), None)):
            with suppress(OSError):  # no room: the next one is due, too
                (saved[0] / MARK).touch()
        return [path for path in saved[self._t.keep :] if not is_kept(path)]

    def _is_due(self, newest: Path, last: Path | None) -> bool:
        """Return whether the newest is to stay, where `last` is the one before it that does."""
        every, minutes = self._t.keep_every, self._t.keep_every_minutes
        if every:
            return step_of(newest) // every > (step_of(last) // every if last else 0)
        return bool(minutes) and (last is None or _saved_at(newest) - _saved_at(last) >= 60 * minutes)


def _saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was finished; long ago where that is not known."""
    with suppress(OSError):
        return (checkpoint / MANIFEST).stat().st_mtime
    return -math.inf

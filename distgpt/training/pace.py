"""What the steps so far say of the next one: how long it usually takes, and may take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from distgpt.config import TrainConfig
from distgpt.training.gradsync.outer import is_local

RECENT = 100  # steps that count


def recent_seconds(t: TrainConfig, ranks: int, step: int, seconds: Sequence[float]) -> list[float]:
    """Of the last steps, after `step`. Of local ones at least a round, or a guess at the first exchange."""
    if not is_local(t, ranks):
        return list(seconds[-RECENT:])
    recent = list(seconds[-max(RECENT, t.outer_every) :])
    has_exchanged = step // t.outer_every > (step - len(seconds)) // t.outer_every
    return recent if has_exchanged else [*recent, sum(recent)]


def usual_seconds(t: TrainConfig, ranks: int, recent: Sequence[float]) -> float:
    """Of a step; where one in a round takes longer, of that one. 0 before the first."""
    if not recent:
        return 0.0
    return max(recent) if is_local(t, ranks) else median(recent)

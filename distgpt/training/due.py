"""What follows a step before the next one, by the settings."""

from __future__ import annotations

from distgpt.config import TrainConfig
from distgpt.training.gradsync.outer import ends_round, round_before


def due_after(t: TrainConfig, step: int, ranks: int, is_assessed: bool) -> set[str]:
    """Of verify, save, sample and evaluate; what is due within a round of local steps waits for its end."""
    if not ends_round(t, step, ranks):
        return set()
    every = {"verify": t.verify_every, "save": t.save_every, "sample": t.sample_every}
    if is_assessed:
        every["evaluate"] = t.eval_every
    before = round_before(t, step, ranks)
    due = {what for what, interval in every.items() if interval and step // interval > before // interval}
    if step == t.steps:
        due |= {"save", "evaluate"} if is_assessed else {"save"}
    return due

"""Settings that do not go together: the core's own, and those of each component that they need."""

from __future__ import annotations

from typing import Protocol

from distgpt.core.base.errors import UsageError, refuse_beside
from distgpt.core.base.tables import COMPONENTS, Table
from distgpt.core.config import TrainConfig
from distgpt.core.data.batches import refuse_uneven


class Check(Protocol):
    """A row of the table of checks."""

    def __call__(self, t: TrainConfig, ranks: int, on_gpu: bool) -> None:
        """Raise a UsageError about what a component does not go with."""


CHECKS: Table[Check] = Table("checks", "component", {})  # by the names of components, which settings give


def refuse_unsuited(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about settings that do not go together."""
    if t.val:
        refuse_beside("--val", {"val-fraction": t.val_fraction}, "each says what is held out")
    if t.is_cut_by_rank:
        refuse_uneven(t.batch_size, ranks, t.grad_accum or 1)
    for component in t.components:
        COMPONENTS.get(component)  # raises an error where it is missing
        if check := CHECKS.get(component):
            check(t, ranks, on_gpu)
    if ranks > 1 and t.gradient_dtype == "bfloat16" and t.dtype == "float64":
        raise UsageError(
            "--gradient-dtype bfloat16 leaves nothing of --dtype float64: use float32 for one of them"
        )

"""Compares the losses of all stages, step by step, with the losses of one of them.

How far rounding alone takes CPU stages apart was measured: the largest relative difference of any step's loss
from that of `serial`, over 50 steps of `gpt-mini` (1, 2 and 4 ranks) and of a model of 3 layers, 96 wide, on
24 × 64 tokens (1 to 4 ranks), with 1 and 2 threads. It was 1.4e-15 in float64 and 5.9e-7 in float32 (Muon:
3.2e-14, and 1.6e-6 over 8 steps). The tolerance is that times a hundred or more, for other machines'
libraries and other models. Of bfloat16, which keeps 8 bits, it is what the
tests of the GPU's kernels allow whole models in that format.

Training is chaotic: in a longer run a rounding grows as any other small change does. A `tiny` model at its
learning rate of 2e-3 was 3e-7 apart after 100 steps, 2e-3 after 150 and 4e-2 after 2,000. So as many steps
are judged as were measured; of later ones the largest difference is reported, and judged if the user sets a
tolerance. Muon makes all directions of an update alike, also those in which a gradient is rounding alone: in
float32 `tiny` was 2e-6 apart after 8 steps, 4e-4 after 16 (1, 2 and 4 ranks), so 8 steps are judged. In
float64 it was 3e-14 apart after 50.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distgpt.measure.compare.stages import Measured


JUDGED, JUDGED_OF_MUON = 50, 8  # steps; the second in float32
TOLERANCES = {"float64": 1e-12, "float32": 6e-5, "bfloat16": 3e-2}


def judged_steps(optimizer: str, dtype: str) -> int:
    """Return in how many steps a difference is told from grown rounding."""
    return JUDGED_OF_MUON if (optimizer, dtype) == ("muon", "float32") else JUDGED


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one stage from the reference. Steps count from 1; None is an infinite difference."""

    stage: str
    reference: str
    tolerance: float
    steps: int  # that both have done
    judged: int  # of these, from the first
    largest: float | None  # of those that are judged
    step: int  # of the largest
    largest_later: float | None  # of those after the judged ones
    first: int | None  # step whose difference is above the tolerance
    at_first: float | None
    agrees: bool

    def sentence(self) -> str:
        """Describe the first loss that is wrong."""
        if self.at_first is None:
            return f"stage {self.stage}: the loss of step {self.first} is not finite"
        return (
            f"stage {self.stage}: the loss of step {self.first} differs from {self.reference}'s by"
            f" {self.at_first:.2g}, more than the tolerance of {self.tolerance:.2g}"
        )


def differences(
    stages: Sequence[Measured], allowed: float | None, optimizer: str = "adamw"
) -> list[Difference]:
    """Compare all stages that have a loss with the first of those with most steps.

    `allowed` replaces the tolerances.
    """
    with_losses = [stage for stage in stages if stage.losses]
    reference = max(with_losses, key=lambda stage: len(stage.losses), default=None)
    if reference is None:
        return []
    others = (stage for stage in with_losses if stage is not reference)
    return [_difference(stage, reference, allowed, optimizer) for stage in others]


def _difference(stage: Measured, reference: Measured, allowed: float | None, optimizer: str) -> Difference:
    limit = max(TOLERANCES[stage.dtype], TOLERANCES[reference.dtype]) if allowed is None else allowed
    found = [relative(a, b) for a, b in zip(stage.losses, reference.losses, strict=False)]
    judged = found[: judged_steps(optimizer, reference.dtype)] if allowed is None else found
    largest = max(judged)
    wrong = (i for i, value in enumerate(found) if value == math.inf or (i < len(judged) and value > limit))
    first = next(wrong, None)
    return Difference(
        stage=stage.stage,
        reference=reference.stage,
        tolerance=limit,
        steps=len(found),
        judged=len(judged),
        largest=_known(largest),
        step=found.index(largest) + 1,
        largest_later=_known(max(found[len(judged) :], default=math.inf)),
        first=None if first is None else first + 1,
        at_first=None if first is None else _known(found[first]),
        agrees=first is None,
    )


def relative(loss: float | None, reference: float | None) -> float:
    """Return the relative difference; infinite if a loss is not finite: beyond any tolerance."""
    if loss is None or reference is None or not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / abs(reference) if reference else (math.inf if loss else 0.0)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None

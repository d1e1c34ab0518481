"""Compares the losses of all stages, step by step, with those of one of them, and finds the verdict.

How far rounding alone takes CPU stages apart was measured: MEASURED is the largest relative difference of
any step's loss from that of `serial`, over 50 steps of `gpt-mini` (1, 2 and 4 ranks) and of a model of 3
layers, 96 wide, on 24 × 64 tokens (1 to 4 ranks), with 1 and 2 threads. The tolerance is that times a hundred
or more, for other machines' libraries and other models. Of bfloat16, which keeps 8 bits, it is what the
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
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from distgpt.doctor.facts import anonymised
from distgpt.jobs.processes import ending
from distgpt.measure import published
from distgpt.measure.compare.stages import (
    INTERRUPTED,
    CompareOptions,
    Measured,
    Runnable,
)
from distgpt.measure.compare.workload import NEW_TOKENS, PROMPT_TOKENS, Opening


class Rounding(NamedTuple):
    """How far it took CPU stages apart in so many steps, relative to the loss; 0 if that was not measured."""

    steps: int
    apart: float = 0


MEASURED = {  # by optimizer and type
    ("adamw", "float64"): Rounding(50, 1.4e-15),
    ("adamw", "float32"): Rounding(50, 5.9e-7),
    ("adamw", "bfloat16"): Rounding(50),
    ("muon", "float64"): Rounding(50, 3.2e-14),
    ("muon", "float32"): Rounding(8, 1.6e-6),
    ("muon", "bfloat16"): Rounding(50),
}
TOLERANCES = {"float64": 1e-12, "float32": 6e-5, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one stage from the reference.

    Steps count from 1; `first` is where the tolerance was first exceeded.

    A loss that is not finite is infinitely far away, in any step: `largest` is None.
    """

    stage: str
    reference: str
    tolerance: float
    steps: int  # that both have done
    judged: int  # of these, from the first
    largest: float | None  # of those that are judged
    step: int  # of the largest
    largest_of_all: float | None
    largest_later: float | None  # of those after the judged ones
    first: int | None
    at_first: float | None
    same_text: bool | None  # None where one of them wrote none
    text_differs_at: int | None  # the number of the first other token, from 1

    @property
    def agrees(self) -> bool:
        return self.first is None

    def sentence(self) -> str:
        """Describe the difference."""
        if self.at_first is None:
            return f"stage {self.stage}: the loss of step {self.first} is not finite"
        return (
            f"stage {self.stage}: the loss of step {self.first} differs from {self.reference}'s by"
            f" {self.at_first:.2g}, more than the tolerance of {self.tolerance:.2g}"
        )


def find_reference(stages: Sequence[Measured]) -> Measured | None:
    """Return the stage that the others are compared with: the first of those with most steps."""
    return max((stage for stage in stages if stage.losses), key=lambda stage: len(stage.losses), default=None)


def differences(
    stages: Sequence[Measured], allowed: float | None, optimizer: str = "adamw"
) -> list[Difference]:
    """Compare all stages that have a loss with the reference; `allowed` replaces the tolerances."""
    reference = find_reference(stages)
    if reference is None:
        return []
    others = (stage for stage in stages if stage.losses and stage is not reference)
    return [_difference(stage, reference, allowed, optimizer) for stage in others]


def _difference(stage: Measured, reference: Measured, allowed: float | None, optimizer: str) -> Difference:
    coarser = max(TOLERANCES[stage.dtype], TOLERANCES[reference.dtype])
    limit = coarser if allowed is None else allowed
    found = [relative(a, b) for a, b in zip(stage.losses, reference.losses, strict=False)]
    judged = found[: MEASURED[optimizer, reference.dtype].steps] if allowed is None else found
    largest = max(judged)
    beyond = [step for step, value in enumerate(judged, 1) if value > limit]
    infinite = [step for step, value in enumerate(found, 1) if value == math.inf]
    first = min([*beyond, *infinite], default=None)
    return Difference(
        stage.stage,
        reference.stage,
        limit,
        len(found),
        len(judged),
        _known(largest),
        found.index(largest) + 1,
        _known(max(found)),
        _known(max(found[len(judged) :], default=math.inf)),
        first,
        None if first is None else _known(found[first - 1]),
        *_texts(stage, reference),
    )


def relative(loss: float | None, reference: float | None) -> float:
    """Return the relative difference; infinite where a loss is not finite: beyond any tolerance."""
    if loss is None or reference is None or not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / abs(reference) if reference else (math.inf if loss else 0.0)


def _texts(stage: Measured, reference: Measured) -> tuple[bool | None, int | None]:
    if stage.inference is None or reference.inference is None:
        return None, None
    ours, theirs = stage.inference["tokens"], reference.inference["tokens"]
    if ours == theirs:
        return True, None
    pairs = enumerate(zip(ours, theirs, strict=False), 1)
    shorter = min(len(ours), len(theirs))
    return False, next((place for place, (a, b) in pairs if a != b), shorter + 1)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


RUNNING, DONE = "running", "done"


@dataclass(slots=True)
class Comparison:
    """The results of a comparison so far."""

    options: CompareOptions
    runnable: Runnable
    opening: Opening
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.options.tolerance, self.options.workload.run.train.optimizer)

    @property
    def problems(self) -> list[str]:
        """The reasons why this comparison failed."""
        died = [
            f"stage {stage.stage} {failure(stage.failed)}"
            for stage in self.measured
            if stage.failed and stage.failed["code"] is not None
        ]
        return [difference.sentence() for difference in self.differences if not difference.agrees] + died

    @property
    def reference(self) -> Measured | None:
        """The stage that the others are compared with."""
        return find_reference(self.measured)

    @property
    def passed(self) -> bool | None:
        """Return whether all agree; None if there was nothing to compare."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        """Say the result in one or two sentences."""
        interrupted = "Interrupted: only what was measured until then is here."
        if self.problems:
            return "; ".join(self.problems) + f". {interrupted}" * (self.state == INTERRUPTED)
        if self.state == INTERRUPTED:
            return interrupted
        if not self.differences:
            only = self.measured[0].stage if self.measured else "no stage"
            return f"Only {only} ran, so there is nothing to compare it with."
        farthest = max(self.differences, key=lambda difference: difference.largest or 0.0)
        largest = farthest.largest or 0.0
        every = "Both" if len(self.measured) == 2 else f"All {len(self.measured)}"
        whole = farthest.judged == farthest.steps
        steps = "any step" if whole else f"the first {farthest.judged} steps"
        by = f"by more than {largest:.1e} ({farthest.stage}, step {farthest.step}; tolerance"
        differs = f"{by} {farthest.tolerance:.0e})" if largest else "in a single bit"
        same = (
            f"{every} stages compute the same: no loss of {steps} differs from {farthest.reference}'s"
            f" {differs}."
        )
        later = max((each.largest_later or 0.0 for each in self.differences), default=0.0)
        growth = ": in a long run rounding grows" if later > largest else ""
        return f"{same} Later ones differ by up to {later:.1e}{growth}." if later else same

    def as_json(self) -> dict[str, Any]:
        """Return everything, for compare.json and --json. Names no folders and hosts of this machine."""
        workload, run = self.options.workload, self.options.workload.run
        settings = asdict(run.model) | asdict(run.train)
        return {
            "state": self.state,
            "passed": self.passed,
            "verdict": self.verdict(),
            "environment": self.environment,
            "workload": {
                "name": workload.name,
                "sentence": workload.sentence(),
                "is_the_course_projects": workload.is_projects,
                **asdict(self.opening),
                "steps": run.train.steps,
                "tokens_per_step": run.train.batch_size * run.model.seq_len,
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": NEW_TOKENS,
                "settings": settings
                | {key: anonymised(settings[key]) for key in ("data", "tokenizer", "init")},
            },
            "launcher": self.runnable.launcher.name if self.runnable.launcher else None,
            "cannot_run": self.runnable.missing,
            "stages": [asdict(stage) for stage in self.measured],
            "differences": [asdict(each) | {"agrees": each.agrees} for each in self.differences],
            "published": published.figures() if workload.is_projects else None,
        }


def failure(failed: dict[str, Any]) -> str:
    """Say how a stage ended."""
    if failed["code"] is None:
        return f"interrupted in {failed['phase']}"
    words = f" ({failed['last_words']})" if failed["last_words"] else ""
    return f"died in {failed['phase']}: {ending(failed['code'])}{words}"

"""What `distgpt compare-stages` has found: the stages, how they differ, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from distgpt.doctor.facts import shown
from distgpt.jobs.processes import ending
from distgpt.measure import published
from distgpt.measure.compare.agreement import Difference, differences, find_reference
from distgpt.measure.compare.stages import (
    INTERRUPTED,
    CompareOptions,
    Measured,
    Runnable,
)
from distgpt.measure.compare.workload import NEW_TOKENS, PROMPT_TOKENS, Opening

RUNNING, DONE = "running", "done"


@dataclass(slots=True)
class Comparison:
    """What has been found so far."""

    options: CompareOptions
    runnable: Runnable
    opening: Opening
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.options.tolerance)

    @property
    def problems(self) -> list[str]:
        """Why this comparison failed; empty if it did not."""
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
        """None if there was nothing to compare."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        """The result in one or two sentences."""
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
        differs = (
            f"by more than {largest:.1e} ({farthest.stage}, step {farthest.step};"
            f" tolerance {farthest.tolerance:.0e})"
        )
        same = (
            f"{every} stages compute the same: no loss of {steps} differs from {farthest.reference}'s"
            f" {differs if largest else 'in a single bit'}."
        )
        later = [each.largest_later for each in self.differences if each.largest_later is not None]
        if not later:
            return same
        growth = ": in a long run rounding grows" if max(later) > largest else ""
        return f"{same} Later ones differ by up to {max(later):.1e}{growth}."

    def as_json(self) -> dict[str, Any]:
        """All of it, for compare.json and --json. Names no folders and hosts of this machine."""
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
                "settings": settings | {key: shown(settings[key]) for key in ("data", "tokenizer", "init")},
            },
            "launcher": self.runnable.launcher.name if self.runnable.launcher else None,
            "cannot_run": self.runnable.missing,
            "stages": [asdict(stage) for stage in self.measured],
            "differences": [asdict(each) | {"agrees": each.agrees} for each in self.differences],
            "published": published.figures() if workload.is_projects else None,
        }


def failure(failed: dict[str, Any]) -> str:
    """How a stage ended, in words."""
    if failed["code"] is None:
        return f"interrupted in {failed['phase']}"
    words = f" ({failed['last_words']})" if failed["last_words"] else ""
    return f"died in {failed['phase']}: {ending(failed['code'])}{words}"

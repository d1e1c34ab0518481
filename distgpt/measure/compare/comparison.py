"""A comparison from the question to the verdict, stage after stage; what there is by then is always kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distgpt.data.batches import refuse_uneven
from distgpt.machine.environment import environment, shown
from distgpt.machine.stages import WITH_MPI
from distgpt.measure.compare import published
from distgpt.measure.compare.agreement import Difference, differences, find_reference
from distgpt.measure.compare.folder import Folder
from distgpt.measure.compare.measuring import DONE, INTERRUPTED, RUNNING, Measured, Stand
from distgpt.measure.compare.progress import Progress, failure
from distgpt.measure.compare.runnable import Jobs, Runnable, find_runnable
from distgpt.measure.compare.workload import NEW_TOKENS, PROMPT_TOKENS, Opening, Workload, look_at_data


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks. `tolerance` takes the place of our own."""

    workload: Workload
    stages: str | None
    jobs: Jobs
    out: Path
    tolerance: float | None = None


@dataclass(slots=True)
class Comparison:
    """What has been found so far."""

    question: Question
    runnable: Runnable
    opening: Opening
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.question.tolerance)

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
        """None where there was nothing to compare."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        """In one or two sentences."""
        interrupted = "Interrupted: only what was measured until then is here."
        if self.problems:
            return "; ".join(self.problems) + f". {interrupted}" * (self.state == INTERRUPTED)
        if self.state == INTERRUPTED:
            return interrupted
        if not self.differences:
            only = self.measured[0].stage if self.measured else "no stage"
            return f"Only {only} ran, so there is nothing to compare it with."
        farthest = max(self.differences, key=lambda difference: difference.largest or 0.0)
        return (
            f"{_all(len(self.measured))} stages compute the same: no loss of {_steps(farthest)} differs from"
            f" {farthest.reference}'s by more than {farthest.largest:.1e}"
            f" ({farthest.stage}, step {farthest.step}; tolerance {farthest.tolerance:.0e}).{self._later()}"
        )

    def _later(self) -> str:
        """What is worth telling of the steps that are not judged."""
        later = [each.largest_later for each in self.differences if each.largest_later is not None]
        if not later:
            return ""
        grown = max(later) > max(each.largest or 0.0 for each in self.differences)
        growth = ": in a long run rounding grows" if grown else ""
        return f" Later ones differ by up to {max(later):.1e}{growth}."

    def facts(self) -> dict[str, Any]:
        """All of it, as JSON can hold it. No folders and hosts of this machine."""
        q, run = self.question, self.question.workload.run
        settings = asdict(run.model) | asdict(run.train)
        return {
            "state": self.state,
            "passed": self.passed,
            "verdict": self.verdict(),
            "environment": self.environment,
            "workload": {
                "name": q.workload.name,
                "sentence": q.workload.sentence(),
                "is_the_course_projects": q.workload.is_projects,
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
            "published": published.figures() if q.workload.is_projects else None,
        }


def _steps(difference: Difference) -> str:
    return "any step" if difference.judged == difference.steps else f"the first {difference.judged} steps"


def _all(count: int) -> str:
    return "Both" if count == 2 else f"All {count}"


def begin(question: Question, folder: Folder) -> Comparison:
    """Refuse what cannot be, and make the folder."""
    run, jobs = question.workload.run, question.jobs
    folder.refuse_foreign()
    runnable = find_runnable(question.stages, jobs)
    if set(runnable.stages) & set(WITH_MPI):
        refuse_uneven(run.train.batch_size, jobs.ranks, run.train.grad_accum or 1)
    opening = look_at_data(run)
    folder.begin(run.to_toml(), opening.prompt, _room(opening, jobs, runnable.stages))
    comparison = Comparison(question, runnable, opening, environment())
    folder.save(comparison.facts())
    return comparison


def measure_all(comparison: Comparison, folder: Folder, progress: Progress) -> None:
    """Run all that can run. Whatever breaks in, the comparison has what there is by then."""
    runnable, jobs = comparison.runnable, comparison.question.jobs
    stand = Stand(folder, jobs, runnable.launcher)
    try:
        for stage in runnable.stages:
            measured = Measured(stage, jobs.ranks if stage in WITH_MPI else 1, jobs.dtype_of(stage))
            comparison.measured.append(measured)
            stand.measure(measured, partial(progress.phase, stage), progress.heard)
            progress.done(measured)
            folder.save(comparison.facts())
        comparison.state = DONE
    except BaseException:
        comparison.state = INTERRUPTED
        raise


def _room(opening: Opening, jobs: Jobs, stages: Sequence[str]) -> int:
    """Bytes: the weights of all stages, and one checkpoint, which goes when its stage is done."""
    number = 8 if "float64" in (jobs.dtype, jobs.gpu_dtype) else 4
    return opening.parameters * number * (len(stages) + 3)

"""`distgpt compare-stages`: run every stage, judge the losses, save and print; what was measured is kept."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from distgpt.data.batches import refuse_uneven
from distgpt.errors import DisagreementError, message, print_lines
from distgpt.machine.facts import environment, shown
from distgpt.machine.processes import ending, undisturbed
from distgpt.machine.stages import WITH_MPI
from distgpt.measure import published
from distgpt.measure.compare.agreement import Difference, differences, find_reference
from distgpt.measure.compare.stages import (
    INTERRUPTED,
    CompareOptions,
    Folder,
    Measured,
    Runnable,
    Runner,
    find_runnable,
    without_effect,
)
from distgpt.measure.compare.workload import NEW_TOKENS, PROMPT_TOKENS, Opening, look_at_data
from distgpt.show.display import Plain

RUNNING, DONE = "running", "done"
SECONDS_BETWEEN_LINES = 10.0
NAME_WIDTH = 9
_STEP = re.compile(r"\s*step\s+\d+/\d+\s")


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


class Progress(Plain):
    """On a terminal one line per stage, which changes; elsewhere plain lines. Called from two threads."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, SECONDS_BETWEEN_LINES)
        self._live = stream.isatty()
        self._lock = threading.Lock()
        self._stage = ""
        self._open = False  # the line on the terminal may still change

    def phase(self, stage: str, phase: str) -> None:
        self._stage = stage
        self.is_due()  # not at once
        self._show(f"{phase} …")

    def line(self, line: str) -> None:
        """Show a child's line if it is about its steps."""
        if _STEP.match(line) and (self._live or self.is_due()):
            self._show(" ".join(line.split()))

    def done(self, measured: Measured) -> None:
        words = []
        if training := measured.training:
            loss = measured.losses[-1] if measured.losses else None
            words.append(f"{training['train_s']:.1f} s of training")
            words.append(f"{training['tokens_per_s']:,.0f} tokens/s in the median step")
            words += [f"loss {loss:.4f}"] if loss is not None else []
        if inference := measured.inference:
            words.append(f"{inference['seconds']:.2f} s of inference")
        if measured.failed:
            words.append(failure(measured.failed))
        self._show("; ".join(words), last=True)

    def close(self) -> None:
        """End the line that may still change."""
        with self._lock:
            if self._open:
                self.say("")
            self._open = False

    def _show(self, text: str, last: bool = False) -> None:
        line = f"{self._stage:<{NAME_WIDTH}} {message(text)}"
        with self._lock:
            if not self._live:
                self.say(line)
                return
            shown = line if last else line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[2K{shown}", end="\n" if last else "", file=self.stream, flush=True)
            self._open = not last


def compare(options: CompareOptions, out: Path, given: Iterable[str], as_json: bool) -> None:
    """Run the whole command; `given` are the flags that the user set. Raises where stages disagree."""
    from distgpt.measure.compare import page

    folder, progress = Folder(out), Progress(sys.stderr)
    comparison = _begin(options, folder)
    for note in without_effect(comparison.runnable.stages, given):
        print_lines(f"note: {note}", err=True)
    runner = Runner(options, comparison.runnable.launcher, folder, progress.phase, progress.line)
    try:
        for stage in comparison.runnable.stages:
            measured = Measured(stage, options.ranks_of(stage), options.dtype_of(stage))
            comparison.measured.append(measured)
            runner.measure(measured)
            progress.done(measured)
            folder.save(comparison.as_json())
        comparison.state = DONE
    except BaseException as error:
        comparison.state = INTERRUPTED
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"what was measured is in {folder.path}")
        raise
    finally:
        with undisturbed():
            folder.save(comparison.as_json())
            folder.write(folder.report, page.html(comparison))
        progress.close()
        if as_json:
            print(json.dumps(comparison.as_json(), indent=1))
        else:
            print_lines(page.terminal(comparison))
        print_lines(f"\nreport  {folder.report}\nresult  {folder.result}", err=as_json)
    if comparison.problems:
        raise DisagreementError("; ".join(comparison.problems))


def _begin(options: CompareOptions, folder: Folder) -> Comparison:
    """Refuse what cannot be compared, and make the folder."""
    run = options.workload.run
    folder.refuse_foreign()
    runnable = find_runnable(options)
    if set(runnable.stages) & set(WITH_MPI):
        refuse_uneven(run.train.batch_size, options.ranks, run.train.grad_accum or 1)
    opening = look_at_data(run)
    element = 8 if "float64" in (run.train.dtype, options.gpu_dtype) else 4
    # The weights of all stages, and one checkpoint, which is deleted when its stage is done.
    folder.begin(run.to_toml(), opening.prompt, opening.parameters * element * (len(runnable.stages) + 3))
    comparison = Comparison(options, runnable, opening, environment())
    folder.save(comparison.as_json())
    return comparison

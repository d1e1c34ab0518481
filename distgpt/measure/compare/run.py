"""`distgpt bench stages`: run every stage, judge the losses, save and print; what was measured is kept."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from distgpt.cluster.jobs.processes import undisturbed
from distgpt.core.base.errors import DisagreementError, one_line, print_lines
from distgpt.core.config import ON_GPU, WITH_MPI
from distgpt.core.data.batches import refuse_uneven
from distgpt.measure.compare.result import DONE, Comparison, failure, render_html, render_terminal
from distgpt.measure.compare.stages import (
    INTERRUPTED,
    CompareOptions,
    Folder,
    Measured,
    Runner,
    find_runnable,
)
from distgpt.measure.compare.workload import look_at_data
from distgpt.measure.doctor.facts import environment
from distgpt.show.progress import Plain

SECONDS_BETWEEN_LINES = 10.0
NAME_WIDTH = 9
_STEP = re.compile(r"\s*step\s+\d+/\d+\s")


class Progress(Plain):
    """Shows a changing line on a terminal, elsewhere plain lines. Called from two threads."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, SECONDS_BETWEEN_LINES)
        self._status = Console(file=stream).status("") if stream.isatty() else None
        self._stage = ""

    def phase(self, stage: str, phase: str) -> None:
        self._stage = stage
        self.is_due()  # not at once
        if self._status:
            self._status.start()
        self._show(f"{phase} …")

    def line(self, line: str) -> None:
        """Show a child's line if it is about its steps."""
        if _STEP.match(line) and (self._status or self.is_due()):
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
        self.close()
        self.say(f"{self._stage:<{NAME_WIDTH}} {'; '.join(words)}")

    def close(self) -> None:
        """End the line that may still change."""
        if self._status:
            self._status.stop()

    def _show(self, text: str) -> None:
        text = f"{self._stage:<{NAME_WIDTH}} {one_line(text)}"
        if self._status:
            self._status.update(Text(text))
        else:
            self.say(text)


def compare(options: CompareOptions, out: Path, given: Iterable[str], as_json: bool) -> None:
    """Run the whole command; `given` are the flags that the user set. Raises where stages disagree."""
    folder, progress = Folder(out), Progress(sys.stderr)
    comparison = _begin(options, folder)
    stages = comparison.runnable.stages
    for flag in given:
        is_of_cpus = flag == "--threads"
        if not set(stages) - set(ON_GPU) if is_of_cpus else not set(stages) & set(WITH_MPI):
            kind = "on the CPU" if is_of_cpus else "with MPI"
            print_lines(f"note: {flag} has no effect: no stage {kind} runs here", err=True)
    runner = Runner(options, comparison.runnable.launcher, folder, progress.phase, progress.line)
    try:
        for stage in stages:
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
            folder.write(folder.report, render_html(comparison))
        progress.close()
        if as_json:
            print(json.dumps(comparison.as_json(), indent=1))
        else:
            print_lines(render_terminal(comparison))
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
    folder.begin(run.to_toml(), opening.prompt)
    comparison = Comparison(options, runnable, opening, environment())
    folder.save(comparison.as_json())
    return comparison

"""`distgpt compare-stages`: compares, leaves the files, prints, and fails where the stages do not agree."""

from __future__ import annotations

import json
from collections.abc import Iterable

import click

from distgpt.errors import DisagreementError
from distgpt.machine.processes import undisturbed
from distgpt.measure.compare import page
from distgpt.measure.compare.comparison import Comparison, Question, begin, measure_all
from distgpt.measure.compare.folder import Folder
from distgpt.measure.compare.progress import Progress
from distgpt.measure.compare.runnable import idle


def answer(question: Question, given: Iterable[str], as_json: bool) -> None:
    """`given` are the options that the user named."""
    folder, progress = Folder(question.out), Progress()
    comparison = begin(question, folder)
    for note in idle(comparison.runnable.stages, given):
        click.echo(f"note: {note}", err=True)
    try:
        measure_all(comparison, folder, progress)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"what was measured is in {folder.path}")
        raise
    finally:
        with undisturbed():
            folder.save(comparison.facts())
            folder.write(folder.report, page.html(comparison))
        progress.close()
        _tell(comparison, folder, as_json)
    if comparison.problems:
        raise DisagreementError("; ".join(comparison.problems))


def _tell(comparison: Comparison, folder: Folder, as_json: bool) -> None:
    click.echo(json.dumps(comparison.facts(), indent=1) if as_json else page.terminal(comparison))
    click.echo(f"\nreport  {folder.report}\nresult  {folder.result}", err=as_json)

"""The line that says that the bundled sample writes, as no --weights are given, and names the newest run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from distgpt.core.base.errors import command_line, print_lines
from distgpt.core.base.tables import MissingComponent, imported

RUNS = Path("runs")


def announce_sample(weights: Path | None, rank: int, *words: str) -> None:
    """Say on rank 0 that the bundled sample writes, if it does, and by which line the newest run would."""
    if weights is not None or rank:
        return
    newest = None
    with suppress(MissingComponent):  # what lists runs
        newest = newest_run(RUNS)
    own = f"; your newest run: {command_line(*words, '--weights', newest)}" if newest else ""
    print_lines(f"no --weights: this is the bundled sample{own}", err=True)


def newest_run(top: Path) -> Path | None:
    """Return the run below this folder that has written weights last."""
    from distgpt.core.saved.checkpoint import WEIGHTS
    from distgpt.core.saved.rundir import RunDirectory

    run_directories = imported("distgpt.show.runs:run_directories", "a list of runs")
    found: dict[float, Path] = {}
    for run in map(RunDirectory, run_directories(top)):
        for file in (run.best, run.weights, *run.checkpoints.glob(f"*/{WEIGHTS}")):
            with suppress(OSError):  # it is not there, or removed meanwhile
                found[file.stat().st_mtime] = run.path
    return found[max(found)] if found else None

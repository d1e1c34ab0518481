"""The line that says that the bundled sample writes, as no --weights are given, and names the newest run."""

from __future__ import annotations

from pathlib import Path

from distgpt.core.base.errors import command_line, print_lines

RUNS = Path("runs")


def announce_sample(weights: Path | None, rank: int, *words: str) -> None:
    """Say on rank 0 that the bundled sample writes, if it does, and by which line the newest run would."""
    if weights is not None or rank:
        return
    from distgpt.core.saved.weights import newest_run

    newest = newest_run(RUNS)
    own = f"; your newest run: {command_line(*words, '--weights', newest)}" if newest else ""
    print_lines(f"no --weights: this is the bundled sample{own}", err=True)

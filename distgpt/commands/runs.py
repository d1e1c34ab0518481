"""distgpt runs"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH
from distgpt.core.base.errors import command_line, print_lines

_SORTED_BY = ("name", "steps", "state", "loss", "validation", "bits-per-byte", "speed", "when")


@command(example="distgpt runs")
@click.argument("directory", type=PATH, default=Path("runs"), metavar="[DIR]")
@click.option(
    "--sort",
    type=click.Choice(_SORTED_BY),
    default="name",
    show_default=True,
    help="Sort by this: the lowest loss, the highest speed or the latest run first.",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def runs(directory: Path, sort: str, reverse: bool, as_json: bool) -> None:
    """List the runs in a directory, runs/ if left out.

    Validation is the lowest loss so far. Next to each loss are its bits per byte, which compare runs with
    different tokenizers. A sweep is one row, with the results of its best run: name its directory to list
    all. A narrow terminal shows fewer columns.
    """
    import json
    from dataclasses import asdict

    from distgpt.show.runs import list_runs, render_terminal

    found = list_runs(directory, sort, reverse)
    if as_json:
        print(json.dumps({"runs": [asdict(run) for run in found]}))
    else:
        empty = f"no runs in {directory}; {command_line('train')} starts one in runs"
        print_lines(render_terminal(found) if found else empty)

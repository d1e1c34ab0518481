"""distgpt plot"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH, LocaleText
from distgpt.core.base.errors import UsageError, command_line, print_lines


@command(example="distgpt plot runs/one runs/other")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=PATH)
@click.option(
    "--out",
    type=PATH,
    help="PNG, SVG or PDF file; <RUN>/curves.png, or curves.png for several runs, if left out.",
)
@click.option(
    "--x",
    "axis",
    type=click.Choice(["steps", "tokens", "time"]),
    default="steps",
    show_default=True,
    help="The horizontal axis.",
)
@click.option(
    "--smooth",
    type=click.IntRange(1),
    help="Average over this many lines of metrics; a 40th of all if left out.",
)
@click.option("--title", type=LocaleText(), help="Title; a single run's name if left out.")
@click.option("--log-loss", is_flag=True, help="Logarithmic loss axis.")
def plot(
    runs: tuple[Path, ...], out: Path | None, axis: str, smooth: int | None, title: str | None, log_loss: bool
) -> None:
    """Draw the curves of runs: loss, learning rate, speed.

    RUN is the directory of a run, or one with several runs in it; the newest run in runs/ if left out.
    """
    from distgpt.show.plot import Look, plot
    from distgpt.show.runs import list_runs

    newest = [] if runs else [Path(run.path) for run in list_runs(Path("runs"), "when", False) if run.step]
    if not runs and not newest:
        raise UsageError(f"no run in runs has recorded a step; {command_line('train')} starts one")
    print_lines(plot(runs or newest[:1], out, Look(axis, smooth, title, log_loss)))

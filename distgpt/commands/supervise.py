"""distgpt supervise"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import line_of
from distgpt.commands.help import command
from distgpt.commands.options import parsed_duration
from distgpt.commands.train import resuming, train
from distgpt.commands.tune import tune
from distgpt.commands.watch_options import write_json
from distgpt.core.base.errors import UsageError
from distgpt.core.config import ON_GPU


@command(
    context_settings={"allow_interspersed_args": False},
    example="distgpt supervise -- mpirun -n 8 -f hosts distgpt train --stage mpi --out runs/mine",
)
@click.option(
    "--min-ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Wait for hosts rather than train on fewer ranks.",
)
@click.option(
    "--restarts", type=click.IntRange(0), help="Start again this often at most. [default: any number]"
)
@click.option(
    "--stall",
    metavar="TIME",
    callback=parsed_duration,
    help="Also start again after this long (as 30m) without a step. [default: never]",
)
@click.argument(
    "words",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- LAUNCH LINE",
    shell_complete=line_of(train, tune),
)
def supervise(min_ranks: int, restarts: int | None, stall: float | None, words: tuple[str, ...]) -> None:
    """Train, and start again after a lost rank or host.

    The job resumes from its last checkpoint, on those hosts of the hostfile that still answer over ssh. Hosts
    beyond the ranks of -n are spare. If there are too few, it runs on fewer ranks. After three ends without a
    step more it stops, and says why.
    """
    from distgpt.cluster.supervise.launch_line import parse
    from distgpt.cluster.supervise.supervisor import Limits, Supervisor

    line = parse(words)
    asked = _parsed(line.command)
    out: Path | None = asked["out"]
    if out is None:
        raise UsageError("name the run's directory, as in --out runs/mine: each start has to find it")
    if asked["resume"] not in (None, "auto") or asked.get("decay_from"):
        raise UsageError(
            f"a run that is supervised resumes from {out} alone: leave out --resume and --decay-from, and"
            " begin a branch without supervision"
        )
    if asked["log_format"] == "json":
        write_json(click.get_current_context(), "supervisor")
    limits = Limits(min_ranks, restarts, stall)
    code = Supervisor(line.with_options(resuming(asked, out)), out, asked["stage"] in ON_GPU, limits).run()
    raise click.exceptions.Exit(code)


def _parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of train or tune, which refuses what it cannot read."""
    found = {"train": train, "tune": tune}[words[0]]
    with found.make_context(f"distgpt {words[0]}", list(words[1:])) as context:
        params: dict[str, Any] = context.params
        return params

"""distgpt runs, plot, compare and replay"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH, POSITIVE, files, json_option, stage_options, texts
from distgpt.core.base.errors import DisagreementError, UndecidedError, UsageError, command_line, print_lines
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.config import DTYPES, ON_GPU, GpuConfig
from distgpt.core.cpu.stages import open_stage

_SORTED_BY = ("name", "steps", "state", "loss", "validation", "bits-per-byte", "speed", "when")


@command(example="distgpt runs")
@click.argument("directory", type=PATH, default=Path("runs"), metavar="[DIR]")
@click.option("--sort", type=click.Choice(_SORTED_BY), default="name", help="Sort by this, the best first.")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@json_option
def runs(directory: Path, sort: str, reverse: bool, as_json: bool) -> None:
    """List the runs in a directory, runs/ if left out.

    Validation is the lowest loss so far. Next to each loss are its bits per byte, which compare runs with
    different tokenizers. A sweep is one row, with the results of its best run: name its directory to list
    all. A narrow terminal shows fewer columns.
    """
    from distgpt.show.runs import list_runs, render_terminal

    found = list_runs(directory, sort, reverse)
    if as_json:
        print(json.dumps({"runs": [asdict(run) for run in found]}))
    else:
        empty = f"no runs in {directory}; {command_line('train')} starts one in runs"
        print_lines(render_terminal(found) if found else empty)


@command(example="distgpt plot runs/one runs/other")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=PATH)
@click.option("--out", type=PATH, help="PNG, SVG or PDF file. [default: curves.png, of a single run in it]")
@click.option("--x", "axis", type=click.Choice(["steps", "tokens", "time"]), default="steps")
@click.option("--smooth", type=POSITIVE, help="Average over this many lines of metrics. [default: a 40th]")
@click.option("--title", help="Title. [default: a single run's name]")
@click.option("--log-loss", is_flag=True, help="Logarithmic loss axis.")
def plot(runs: tuple[Path, ...], **how: Any) -> None:
    """Draw the curves of runs: loss, learning rate, speed.

    RUN is the directory of a run, or one with several runs in it; the newest run in runs/ if left out.
    """
    from distgpt.show.plot import plot
    from distgpt.show.runs import list_runs

    newest = [] if runs else [Path(run.path) for run in list_runs(Path("runs"), "when", False) if run.step]
    if not runs and not newest:
        raise UsageError(f"no run in runs has recorded a step; {command_line('train')} starts one")
    print_lines(plot(runs or newest[:1], **how))


@command(example="distgpt compare runs/first runs/second")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@json_option
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Say at which step two runs part, and why.

    Reads the files of both, and computes nothing: losses, gradient norms and weights to the bit, then
    settings, text, versions, processors, ranks and threads at the step where they part. Exit code 1: they
    do. (bench stages is for one job that it trains on several stages.)
    """
    from distgpt.measure.verification.comparing import compare as compare_runs
    from distgpt.measure.verification.comparing import page, verdict

    found = compare_runs(a, b)
    print_lines(json.dumps(found.to_json()) if as_json else page(found))
    if found.at is not None:
        raise DisagreementError(verdict(found))


def _steps(context: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """Parse 5000:5010, or a single step."""
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", value)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"--steps {value!r}: give the first step and the last one, from 1, as in 5000:5010")
    return first, last


@command(example="distgpt replay runs/mine --steps 5000:5010")
@click.argument("run", type=PATH)
@click.option(
    "--steps",
    required=True,
    metavar="FIRST:LAST",
    callback=_steps,
    help="Recompute these steps, the last one included.",
)
@stage_options
@click.option("--data", shell_complete=texts, help="The run's text, if it is elsewhere now.")
@click.option("--init", shell_complete=files, help="The weights that the run began with, if elsewhere now.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Compute in this format. [default: the run's]")
@json_option
def replay(
    run: Path, steps: tuple[int, int], stage: str, threads: int | None, gpu: GpuConfig, **options: Any
) -> None:
    """Recompute steps of a run, and prove that they are what the run says.

    Begins with the newest checkpoint before the steps, or with the first weights, and compares losses,
    gradient norms and the weights of checkpoints: to the bit where the same bits are promised, else within
    rounding. Any number of ranks can do so, under mpirun with --stage mpi. Writes nothing into RUN. Exit code
    1: they differ. 3: rounding is expected, and none of these steps could be judged.
    """
    from distgpt.measure.verification.replaying import Again, difference, page, undecided
    from distgpt.measure.verification.replaying import replay as replay_run

    as_json = options.pop("as_json")
    ready = open_stage(stage, threads, gpu)
    given = {name: value for name, value in options.items() if value is not None}

    def say(text: str) -> None:
        if ready.comm.rank == 0:
            print_lines(text, err=True)

    found = replay_run(Again(run, *steps, given, threads is None and stage not in ON_GPU, ready, say))
    if found:
        print_lines(json.dumps(found.to_json()) if as_json else page(found))
    if verdict := on_root(ready.comm, lambda: found and difference(found)):
        raise shared(DisagreementError(f"{run} is not what these steps compute: {verdict}"))
    if doubt := on_root(ready.comm, lambda: found and undecided(found)):
        raise shared(UndecidedError(f"{run}: {doubt}"))

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
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.config import DTYPES, ON_GPU, GpuConfig
from distgpt.core.cpu.stages import open_stage

_SORTED_BY = ("name", "steps", "state", "loss", "validation", "bits-per-byte", "speed", "when")


@command(example="distgpt runs")
@click.argument("directory", type=PATH, default=Path("runs"), metavar="[DIR]")
@click.option("--sort", type=click.Choice(_SORTED_BY), default="name", help="Column to sort by, best first.")
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@json_option
def runs(directory: Path, sort: str, reverse: bool, as_json: bool) -> None:
    """List the runs in a directory. [default: runs]

    The validation column has the lowest loss. Bits per byte compare runs with different tokenizers. A sweep
    is one row with the results of its best run; pass its directory to list all runs. A narrow terminal shows
    fewer columns.
    """
    from distgpt.show.runs import list_runs, render_terminal

    result = list_runs(directory, sort, reverse)
    if as_json:
        print(json.dumps({"runs": [asdict(run) for run in result]}))
    else:
        empty = f"no runs in {directory}; to start one in runs: {command_line('train')}"
        print_lines(render_terminal(result) if result else empty)


@command(example="distgpt plot runs/one runs/other")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=PATH)
@click.option(
    "--out", type=PATH, help="PNG, SVG or PDF file. [default: curves.png, for one run in its directory]"
)
@click.option("--x", "axis", type=click.Choice(["steps", "tokens", "time"]), default="steps")
@click.option("--smooth", type=POSITIVE, help="Average over N logged steps. [default: 1/40 of them]")
@click.option("--title", help="Title. [default: name of the run, if there is only one]")
@click.option("--log-loss", is_flag=True, help="Logarithmic loss axis.")
def plot(runs: tuple[Path, ...], **how: Any) -> None:
    """Plot the loss, learning rate and speed of runs.

    RUN is a run directory or a directory of runs. [default: the newest run in runs]
    """
    from distgpt.show.plot import plot

    print_lines(plot(runs or _newest(), **how))


def _newest() -> tuple[Path, ...]:
    """Return the newest run in runs that has recorded a step."""
    from distgpt.show.runs import list_runs

    newest = [Path(run.path) for run in list_runs(Path("runs"), "when", False) if run.step]
    if not newest:
        raise UsageError(f"no run in runs has recorded a step; start one with {command_line('train')}")
    return (newest[0],)


@command(example="distgpt watch --open")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=PATH)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1. 0: a free one.")
@click.option("--open", "is_opened", is_flag=True, help="Open the page in the browser.")
@click.option("--html", type=PATH, help="Write the page to this file every 15 seconds, until all runs end.")
def watch(runs: tuple[Path, ...], port: int, is_opened: bool, html: Path | None) -> None:
    """Show runs on a web page as they train, until Ctrl-C.

    RUN is a run directory or a directory of runs. [default: the newest run in runs]
    """
    if html and (port or is_opened):
        raise UsageError("--html starts no server; omit --port and --open")
    from distgpt.show.watch import serve_page, write_page

    paths = runs or _newest()
    write_page(paths, html) if html else serve_page(paths, port, is_opened)


@command(example="distgpt compare runs/first runs/second")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@json_option
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Report the step at which two runs diverge, and why.

    Compares losses, gradient norms and weights bitwise, from the files of both runs; then settings, data,
    versions, processors, ranks and threads at the step of divergence. Exit code 1: they diverge. To run one
    job on multiple stages, use distgpt bench stages.
    """
    from distgpt.measure.verification.comparing import compare as compare_runs
    from distgpt.measure.verification.comparing import page, verdict

    result = compare_runs(a, b)
    print_lines(json.dumps(result.to_json()) if as_json else page(result))
    if result.at is not None:
        raise DisagreementError(verdict(result))


def _steps(context: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """Parse 5000:5010, or a single step."""
    result = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", value)
    first, last = (int(result[1]), int(result[2] or result[1])) if result else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f"--steps {value!r} must be a step or FIRST:LAST, counted from 1, such as 5000:5010")
    return first, last


@command(example="distgpt replay runs/mine --steps 5000:5010")
@click.argument("run", type=PATH)
@click.option(
    "--steps",
    required=True,
    metavar="FIRST:LAST",
    callback=_steps,
    help="Steps to recompute, including the last one.",
)
@stage_options
@click.option("--data", shell_complete=texts, help="Training data, if it has moved.")
@click.option("--init", shell_complete=files, help="Initial weights, if they have moved.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Number format for computing. [default: the run's]")
@json_option
def replay(
    run: Path, steps: tuple[int, int], stage: str, threads: int | None, gpu: GpuConfig, **options: Any
) -> None:
    """Recompute steps of a run and compare them with its records.

    Starts from the newest checkpoint before the steps, or from the initial weights. Compares losses, gradient
    norms and checkpoint weights, bitwise if the run's settings guarantee that, otherwise within rounding.
    Works on any number of ranks with mpirun and --stage mpi. Does not write to RUN. Exit code 1: they differ;
    3: rounding errors prevent a verdict.
    """
    from distgpt.measure.verification.replaying import Again, difference, page, undecided
    from distgpt.measure.verification.replaying import replay as replay_run

    as_json = options.pop("as_json")
    ready = open_stage(stage, threads, gpu)
    given = {name: value for name, value in options.items() if value is not None}

    def say(text: str) -> None:
        if ready.comm.rank == 0:
            print_lines(text, err=True)

    result = replay_run(Again(run, *steps, given, threads is None and stage not in ON_GPU, ready, say))
    if result:
        print_lines(json.dumps(result.to_json()) if as_json else page(result))
    if verdict := on_root(ready.comm, lambda: result and difference(result)):
        raise collective_error(DisagreementError(f"{run} does not match its recomputed steps: {verdict}"))
    if doubt := on_root(ready.comm, lambda: result and undecided(result)):
        raise collective_error(UndecidedError(f"{run}: {doubt}"))

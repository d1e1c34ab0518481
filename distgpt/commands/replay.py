"""distgpt replay"""

from __future__ import annotations

import re
from pathlib import Path

import click

from distgpt.commands.complete import files, texts
from distgpt.commands.help import command
from distgpt.commands.options import PATH, stage_options
from distgpt.core.base.errors import DisagreementError, UndecidedError, UsageError, print_lines
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.config import DTYPES, ON_GPU, GpuConfig
from distgpt.core.cpu.stages import open_stage


def _steps(context: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """Parse 5000:5010, or a single step."""
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", value)
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
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
@click.option("--data", shell_complete=texts, help="The run's text, if it lies elsewhere now.")
@click.option(
    "--init", shell_complete=files, help="The weights that the run began with, if they lie elsewhere now."
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Compute in this number format; in the run's if left out."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def replay(
    run: Path,
    steps: tuple[int, int],
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    data: str | None,
    init: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Recompute steps of a run, and prove that they are what the run says.

    Begins with the newest checkpoint before the steps, or with the first weights, and compares losses,
    gradient norms and the weights of checkpoints: to the bit where the same bits are promised, else within
    rounding. Any number of ranks can do so, under mpirun with --stage mpi. Writes nothing into RUN. Exit code
    1: they differ. 3: rounding is expected, and none of these steps could be judged.
    """
    import json

    from distgpt.measure.verification.replaying import Request, difference, page, undecided
    from distgpt.measure.verification.replaying import replay as replay_run

    ready = open_stage(stage, threads, gpu)
    values = {"data": data, "init": init, "dtype": dtype}
    given = {name: value for name, value in values.items() if value is not None}

    def say(text: str) -> None:
        if ready.comm.rank == 0:
            print_lines(text, err=True)

    found = replay_run(Request(run, *steps, given, threads is None and stage not in ON_GPU), ready, say)
    if found:
        print_lines(json.dumps(found.to_json()) if as_json else page(found))
    if verdict := on_root(ready.comm, lambda: found and found.is_different and difference(found)):
        raise shared(DisagreementError(f"{run} is not what these steps compute: {verdict}"))
    if doubt := on_root(ready.comm, lambda: found and undecided(found)):
        raise shared(UndecidedError(f"{run}: {doubt}"))

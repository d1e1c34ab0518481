"""distgpt sweep"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH, parsed_duration, stage_options
from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.config import GpuConfig


@command(example="mpirun -n 4 distgpt sweep GRID.toml")
@click.argument("grid", type=PATH, metavar="GRID.toml")
@stage_options
@click.option("--out", type=PATH, help="Write the sweep into this directory. [default: runs/<name of GRID>]")
@click.option(
    "--time-limit",
    metavar="TIME",
    callback=parsed_duration,
    help="Save and exit with 75 before this time (as 3h50m) is over. [default: the batch job's, if known]",
)
@click.option("--dry-run", is_flag=True, help="List the runs and about how long they take; train nothing.")
def sweep(
    grid: Path,
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    out: Path | None,
    time_limit: float | None,
    dry_run: bool,
) -> None:
    """Train many short runs, and find the best settings.

    GRID.toml has settings as --config of `distgpt train` takes them, and a table of those that vary:

    \b
      preset = "fast"
      val_fraction = 0.1
      steps = 300
      [sweep]
      lr = [0.01, 0.02, 0.04]               # one of these
      embedding_lr = {low = 0.1, high = 1}  # drawn at random; scale = "log"
      seed = [1, 2]                         # each point has these seeds
      draws = 12                            # that many points
      rungs = 2                             # compare at 1/3 of the steps, then
      eta = 3                               # promote the best third to the end
      metric = "val_loss"                   # or bits_per_byte, loss

    mpirun -n 4 distgpt sweep GRID.toml trains a run on each of 4 ranks. The same command again resumes.
    """
    from distgpt.core.comm.agree import on_root
    from distgpt.launch.environment import job_end
    from distgpt.sweep.opening import begin_sweep, open_stages, preview
    from distgpt.sweep.report import finish
    from distgpt.sweep.work import Listener, Worker

    if gpu.deterministic and stage == "serial":
        raise UsageError("--deterministic: on CPUs, say reproducible_parts = 8 in GRID.toml")
    end = job_end(time_limit)
    say = partial(print_lines, err=True)
    comm, ready = open_stages(stage, threads, gpu)
    if dry_run:
        on_root(comm, lambda: print_lines(preview(grid, ready, comm.size, say)))
        return
    ledger = begin_sweep(comm, ready, grid, out or Path("runs") / grid.stem, say)
    Worker(ledger, ready, Listener(say), end).work()
    if comm.rank == 0:
        print_lines(finish(ledger))

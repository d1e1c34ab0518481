"""distgpt estimate, profile, sweep, doctor and compile"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import (
    PATH,
    POSITIVE,
    TIME,
    FiniteRange,
    asked_by,
    json_option,
    preset_options,
    set_option,
    settings,
    settings_but,
    sizing_options,
    stage_options,
)
from distgpt.core.base.errors import Say, StorageError, UsageError, print_lines, reject_combination
from distgpt.core.base.formatting import clock, count, parse_count, parse_duration, size
from distgpt.core.config import ON_GPU, STAGES, GpuConfig
from distgpt.core.config.setting import Values
from distgpt.core.cpu.stages import open_stage


@command(example="distgpt estimate --preset gpt2 --batch-tokens 65536 --tokens 2.5B")
@stage_options
@preset_options
@settings
@sizing_options
@click.option("--ranks", type=POSITIVE, default=1, help="Number of ranks.")
@click.option("--tokens", help="Total training tokens (300M, 10B), instead of --steps.")
@click.option("--rate", type=FiniteRange(0, min_open=True), help="Tokens/s of one rank, if known.")
@click.option(
    "--measure/--no-measure",
    "measured",
    default=None,
    help="Time a few steps on this machine. [default: if possible, unless --rate is set]",
)
@click.option("--gpu-memory", type=FiniteRange(0, min_open=True), help="Memory of each rank's GPU in GiB.")
@json_option
def estimate(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    ranks: int,
    tokens: str | None,
    rate: float | None,
    measured: bool | None,
    gpu_memory: float | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Estimate what a run takes: memory, disk and time."""
    if tokens is not None and flags["steps"] is not None:
        raise click.UsageError("--tokens and --steps cannot be combined")
    import json

    from distgpt.measure.estimate import Question, foreseen, render_terminal
    from distgpt.measure.estimate import estimate as estimated
    from distgpt.recipes.depth import described
    from distgpt.recipes.derived import derived
    from distgpt.recipes.within import with_clock

    say = partial(print_lines, err=True)
    gpu, asked = asked_by(stage, gpu, flags)
    asked = replace(asked, fetches=False)
    here = None  # the stage, if it is open
    if asked.within is not None and not asked.preset:
        others = {"no-measure": measured is False, "rate": rate, "ranks 2 or more": ranks > 1}
        reject_combination(
            "--within", others, "--within measures one rank on this machine; use --depth instead"
        )
        here = open_stage("cuda" if stage in ON_GPU else "serial", threads, gpu)
        asked = with_clock(asked, here, say)
    elif asked.within is not None:
        asked = replace(asked, given={**asked.given, "train_minutes": parse_duration(asked.within) / 60})
    plain = derived(asked, ranks)
    run = foreseen(stage, plain, gpu.tf32)
    if asked.depth is not None:
        say(described(run))
    total = parse_count(tokens, "--tokens") if tokens is not None else None
    question = Question(run, stage, ranks, threads, gpu, total, rate, measured, gpu_memory)
    facts = estimated(question, say, here)
    if as_json:
        print(json.dumps({"name": plain.name, **facts}, indent=1))
    else:
        print_lines(render_terminal(plain.name, facts))


# Training settings that differ here, or that apply between steps.
UNUSED = (
    *("--steps", "--save-every", "--sample-every", "--eval-every"),
    *("--val-tokens", "--hellaswag", "--save", "--on-bad-step"),
)


@command(example="distgpt profile --preset gpt-mini --steps 20")
@stage_options
@preset_options
@settings_but(*UNUSED)
@click.option("--steps", type=POSITIVE, default=10, help="Steps to measure.")
@click.option("--warmup-steps", type=POSITIVE, default=2, help="Steps to run before measuring.")
@click.option("--out", type=PATH, default=Path("profile"), help="Output directory.")
def profile(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    steps: int,
    warmup_steps: int,
    out: Path,
    **flags: Any,
) -> None:
    """Measure the time of each operation in a training step.

    Accepts the settings of distgpt train and runs --steps steps. Reports the time of each kind of operation,
    the speed of its matmuls, and their share of this machine's measured peak, as a table and in profile.json.
    Saves no weights.
    """
    gpu, asked = asked_by(stage, gpu, flags)
    asked = replace(asked, given={**asked.given, "steps": warmup_steps + steps})
    # The kernels of a CUDA graph cannot be timed individually.
    ready = open_stage(stage, threads, replace(gpu, graphs=False) if stage in ON_GPU else gpu)

    from distgpt.measure.profile.session import measure
    from distgpt.recipes import followed
    from distgpt.recipes.derived import configured

    say: Say = partial(print_lines, err=True) if ready.comm.rank == 0 else lambda text: None
    run = configured(ready.comm, followed(asked, ready, say))
    table = measure(ready, run, steps, warmup_steps, out, say)
    if ready.comm.rank == 0:
        print_lines(table)


@command(example="mpirun -n 4 distgpt sweep GRID.toml")
@click.argument("grid", type=PATH, metavar="GRID.toml")
@stage_options
@set_option
@click.option("--out", type=PATH, help="Output directory. [default: runs/<name of GRID>]")
@click.option(
    "--time-limit",
    type=TIME,
    help="Save and exit with 75 before this time, such as 3h50m. [default: the batch job's limit]",
)
@click.option("--dry-run", is_flag=True, help="List the runs without training.")
def sweep(
    grid: Path,
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    assigned: Values,
    out: Path | None,
    time_limit: float | None,
    dry_run: bool,
) -> None:
    """Train many short runs to find the best settings.

    GRID.toml has settings, as for --config of distgpt train, and a table of the settings that vary:

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

    mpirun -n 4 distgpt sweep GRID.toml trains one run per rank. To resume, repeat the command.
    """
    from distgpt.cluster.launch.environment import job_end
    from distgpt.core.comm.agree import on_root
    from distgpt.measure.sweep.report import finish
    from distgpt.measure.sweep.work import Listener, Worker, begin_sweep, open_stages, preview

    if gpu.deterministic and stage == "serial":
        raise UsageError("--deterministic requires GPUs; on CPUs, set reproducible_parts = 8 in GRID.toml")
    end = job_end(time_limit)
    say = partial(print_lines, err=True)
    comm, ready = open_stages(stage, threads, gpu)
    if dry_run:
        on_root(comm, lambda: print_lines(preview(grid, ready, assigned)))
        return
    ledger = begin_sweep(comm, ready, grid, out or Path("runs") / grid.stem, say, assigned)
    Worker(ledger, ready, Listener(say), end).work()
    if comm.rank == 0:
        print_lines(finish(ledger))


@command(example="distgpt doctor --hostfile hostfile --ssh")
@click.option("--stage", type=click.Choice(STAGES), help="Exit with 2 if this stage cannot run here.")
@json_option
@click.option(
    "--hostfile", type=PATH, help="Check the hosts of a job before its launch; exit with 2 on errors."
)
@click.option("--ssh", is_flag=True, help="With --hostfile: query each host over ssh.")
@click.option("--caches", is_flag=True, help="List distgpt's caches on disk.")
@click.option(
    "--empty",
    type=click.Choice(("compiled", "all")),
    help="With --caches: delete compiled kernels, or also downloads. Safe while other processes run.",
)
def doctor(
    stage: str | None, as_json: bool, hostfile: Path | None, ssh: bool, caches: bool, empty: str | None
) -> None:
    """Check what this machine, an mpirun job, or the hosts in a hostfile can run."""
    if empty and not caches:
        raise UsageError("--empty requires --caches")
    if ssh and not hostfile:
        raise UsageError("--ssh requires --hostfile FILE")
    if caches:
        reject_combination(
            "--caches", {"stage": stage, "hostfile": hostfile}, "--caches prints a separate report"
        )
        from distgpt.measure.doctor.caches import report_caches

        report_caches(empty or "", as_json)
    elif hostfile:
        reject_combination("--hostfile", {"stage": stage}, "--stage checks only this machine")
        from distgpt.measure.doctor import hosts

        hosts.report(hostfile, ssh, as_json)
    else:
        from distgpt.measure.doctor.report import report

        report(stage, as_json)


@command(example="distgpt compile")
def compile() -> None:
    """Compile all kernels for this kind of processor, for all users of this installation.

    Writes one file next to the package, which only the package's owner may write. Run it once on each kind of
    node, and again after an update. Does not include float64 kernels.
    """
    import io
    import tempfile
    from contextlib import redirect_stderr

    from distgpt.core.cpu.compiling import disk_cache
    from distgpt.core.cpu.compiling.processor import processor
    from distgpt.measure import site_cache

    site_cache.require_writable()
    if disk_cache.folder() is None:  # loops are cached there before they are shared
        raise StorageError(
            "cannot cache compiled loops; set DISTGPT_CACHE to a directory only you can write to"
        )
    begun, known = time.monotonic(), len(disk_cache.used)
    with tempfile.TemporaryDirectory(prefix="distgpt-compile-") as folder:
        parts = list(site_cache.parts(Path(folder)))
        print_lines(
            f"compiling {count(len(parts), 'part')} for {processor()[0]}, which takes some minutes;"
            " after an interruption, repeat the command to continue"
        )
        for name, act in parts:
            started = time.monotonic()
            with redirect_stderr(io.StringIO()):
                act()  # notes of training are irrelevant here
            new, known = len(disk_cache.used) - known, len(disk_cache.used)
            print_lines(f"{clock(time.monotonic() - started):>5}  {count(new, 'kernel'):>11}  {name}")
    path = site_cache.share()
    print_lines(
        f"{count(len(disk_cache.used), 'kernel')} in {clock(time.monotonic() - begun)}: {path}, "
        f"{size(path.stat().st_size)}, for all users with this type of processor"
    )

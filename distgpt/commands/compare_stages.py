"""distgpt compare-stages"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from distgpt.commands.complete import presets
from distgpt.commands.help import command
from distgpt.commands.options import (
    PATH,
    Threads,
    launch_options,
    set_by_user,
    setting_option,
    settings_but,
)
from distgpt.core.base.errors import UsageError
from distgpt.core.config import DTYPES, ON_GPU, SETTINGS, STAGES

_OF_SOME_STAGES = ("ranks", "hostfile", "launcher", "threads")  # options without effect on the others

DTYPE_HELP = "Compute in this number format; in float32 if left out, in which losses agree to 6e-5."


@command(name="compare-stages", example="distgpt compare-stages --ranks 2")
@click.option("--stages", metavar="STAGE,…", help="Only these; all that can run here if left out.")
@launch_options
@click.option("--threads", type=Threads(), help="Threads per rank of the CPU stages.")
@click.option("--full", is_flag=True, help="All 50 epochs of the course project, not the first 21.")
@click.option(
    "--preset", shell_complete=presets, help="Another workload: a named configuration (tiny, gpt2, …)."
)
@click.option("--config", type=PATH, help="TOML file with settings.")
@settings_but("--dtype")
@setting_option("dtype", replace(SETTINGS["dtype"], undecided="", help=DTYPE_HELP), default=None)
@click.option("--gpu-dtype", type=click.Choice(DTYPES), help="Number format of the GPU stages; --dtype's.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Largest relative difference of a loss; by the number format if left out.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="CPU stages only, with --reproducible-parts 8: their losses must be equal to the bit.",
)
@click.option("--out", type=PATH, default=Path("compare"), show_default=True, help="The folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def compare_stages(
    stages: str | None,
    ranks: int,
    hostfile: Path | None,
    launcher: str | None,
    threads: int | None,
    full: bool,
    preset: str | None,
    config: Path | None,
    gpu_dtype: str | None,
    tolerance: float | None,
    deterministic: bool,
    out: Path,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run the same job through every stage, and prove that all compute the same.

    Trains and then lets the model write, each in a process of its own. Without a workload of yours it is that
    of the course project, next to the figures that it published. Leaves compare.json and report.html in
    --out. Exit code 1: losses differ by more than the tolerance, or a stage died. (`compare` is for two runs
    that are there.)
    """
    from distgpt.measure.compare.run import compare
    from distgpt.measure.compare.stages import CompareOptions
    from distgpt.measure.compare.workload import find_workload

    if tolerance is not None and not math.isfinite(tolerance):
        raise UsageError(f"--tolerance {tolerance}: all losses would agree, or none; give a finite number")
    if deterministic:
        on_cpu = [stage for stage in STAGES if stage not in ON_GPU]
        if tolerance or not {*(stages or "serial").split(",")} <= {*on_cpu}:
            raise UsageError(f"--deterministic is for {' and '.join(on_cpu)}, with a tolerance of 0")
        tolerance, stages = 0.0, stages or ",".join(on_cpu)
    workload = find_workload(preset, config, set_by_user(flags), full, deterministic)
    gpu_dtype = gpu_dtype or workload.run.train.dtype
    options = CompareOptions(workload, stages, ranks, launcher, hostfile, threads, gpu_dtype, tolerance)
    source = click.get_current_context().get_parameter_source
    named = [f"--{name}" for name in _OF_SOME_STAGES if source(name) is not ParameterSource.DEFAULT]
    compare(options, out, named, as_json)

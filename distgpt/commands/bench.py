"""distgpt bench: train, infer, allreduce, stages"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from distgpt.cluster.launch.environment import launched_as
from distgpt.commands.help import Group
from distgpt.commands.options import (
    PATH,
    POSITIVE,
    FiniteRange,
    Threads,
    json_option,
    launch_options,
    presets,
    set_by_user,
    setting_option,
    settings,
    settings_but,
    stage_options,
    together,
)
from distgpt.core.base.errors import UsageError
from distgpt.core.config import DTYPES, ON_GPU, ROUNDED_DTYPES, SETTINGS, STAGES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


DTYPE_HELP = "Compute in this number format; in float32 if left out, in which losses agree to 6e-5."


def refuse_launched(name: str) -> None:
    """Reject a launch with multiple processes. Each would measure, and start its own processes."""
    if launched_as() > 1:
        raise UsageError(
            f"distgpt bench {name} is for one process, and was launched as {launched_as()}: "
            "run it without a launcher"
        )


@click.group(cls=Group)
def bench() -> None:
    """Measure this machine: training, inference, sums over ranks; and compare its stages."""


def result_options(name: str) -> Callable[[F], F]:
    """Add the options for the results. `name` describes the default of --name."""
    return together(
        click.option("--name", help=f"Name of the results; {name} if left out."),
        click.option("--out", type=PATH, default=Path("bench"), help="Folder for results."),
        json_option,
    )


def to_options(kind: type[T], given: dict[str, Any]) -> T:
    """Return a command's options as its dataclass. Settings of a run that the user set are in `settings`."""
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    settings = set_by_user({key: value for key, value in given.items() if key not in own})
    more = {"settings": settings} if "settings" in own else {}
    return kind(**{key: value for key, value in given.items() if key in own}, **more)


def preset_option(default: str) -> Callable[[F], F]:
    return click.option("--preset", default=default, shell_complete=presets, help="A named configuration.")


# The programs in benchmarks/ that measure other software share these options.
train_options = together(
    stage_options, launch_options, preset_option("tiny"), settings, result_options("preset and stage")
)


@bench.command("train", example="distgpt bench train --preset gpt-mini --ranks 2 --stage mpi")
@train_options
@click.option("--measure-peak", is_flag=True, hidden=True)  # set for the processes that this command starts
def train(measure_peak: bool, **given: Any) -> None:
    """Train for a few steps: tokens per second, share of the machine's peak, memory.

    Takes the settings of `distgpt train`; --steps is 20 if left out.
    """
    from distgpt.measure.bench import train

    options = to_options(train.TrainOptions, given)
    if measure_peak:
        train.measure_peak(options)
    else:
        refuse_launched("train")
        train.bench(options)


DTYPES_INFERRED = ("float32", "bfloat16", *ROUNDED_DTYPES)


infer_options = together(
    preset_option("gpt2"),
    click.option("--threads", type=Threads(), help="All cores if left out."),
    click.option(
        "--dtype", "dtypes", type=click.Choice(DTYPES_INFERRED), multiple=True, default=DTYPES_INFERRED
    ),
    click.option(
        "--requests", type=POSITIVE, multiple=True, default=(1, 8, 32), help="How many at once. Repeatable."
    ),
    click.option("--prompt", type=POSITIVE, default=256, help="Tokens of a prompt."),
    click.option("--new", type=click.IntRange(2), default=64, help="New tokens."),
    click.option("--rounds", type=POSITIVE, default=1, help="Times that all is measured; the median counts."),
    result_options("the preset's"),
)


@bench.command("infer", example="distgpt bench infer --preset gpt-mini")
@infer_options
def infer(**given: Any) -> None:
    """Generate from prompts, one request and many at once: prefill, decode, all.

    Weights are random.
    """
    from distgpt.measure.bench import infer

    refuse_launched("infer")
    infer.bench(to_options(infer.InferOptions, given))


@bench.command("allreduce", example="distgpt bench allreduce --ranks 2")
@click.option("--stage", type=click.Choice(["mpi", "mpi-cuda"]), default="mpi")
@launch_options
@click.option("--sizes", metavar="BYTES,…", help="Sizes of the arrays, in this order, as in 8,64K,16M.")
@click.option("--max-bytes", default="256M", help="Largest size, if --sizes is left out.")
@click.option(
    "--algorithms", metavar="NAME,…", help="allreduce, shared memory, hierarchical; of mpi-cuda: nccl, host."
)
@click.option("--repeats", type=POSITIVE, default=30, help="Most repetitions of a size.")
@click.option("--seconds", type=FiniteRange(1), default=60.0, help="About how long, in all.")
@result_options(name="stage and ranks")
@click.option("--measure-only", is_flag=True, hidden=True)  # set for the ranks that this command starts
def allreduce(**given: Any) -> None:
    """Time the sum over ranks that every training step makes, by size and by algorithm.

    Starts the ranks itself, or measures with those of the launcher that it was started by.
    """
    from distgpt.measure.bench import allreduce

    allreduce.bench(to_options(allreduce.AllreduceOptions, given))


@bench.command("stages", example="distgpt bench stages --ranks 2")
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
    type=FiniteRange(0),
    help="Largest relative difference of a loss; by the number format if left out.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="CPU stages only, with --reproducible-parts 8: their losses must be equal to the bit.",
)
@click.option("--out", type=PATH, default=Path("compare"), help="The folder.")
@json_option
def compare_stages(
    stages: str | None,
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

    Trains and then lets the model write, each in a process of its own. The default workload is the course
    project's. Leaves compare.json in --out. Exit code 1: losses differ by more than the tolerance, or a stage
    died. (`compare` is for two existing runs.)
    """
    from distgpt.measure.stages import CompareOptions, compare, find_workload

    refuse_launched("stages")
    if deterministic:
        on_cpu = [stage for stage in STAGES if stage not in ON_GPU]
        if tolerance or not {*(stages or "serial").split(",")} <= {*on_cpu}:
            raise UsageError(f"--deterministic is for {' and '.join(on_cpu)}, with a tolerance of 0")
        tolerance, stages = 0.0, stages or ",".join(on_cpu)
    how = {key: flags.pop(key) for key in ("ranks", "hostfile", "launcher", "threads")}
    name, run = find_workload(preset, config, set_by_user(flags), full, deterministic)
    how |= {"stages": stages, "gpu_dtype": gpu_dtype or run.train.dtype, "tolerance": tolerance}
    compare(CompareOptions(name, run, **how), out, as_json)

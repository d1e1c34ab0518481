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
from distgpt.core.config import DTYPES, ON_GPU, QUANTIZED_DTYPES, SETTINGS, STAGES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


DTYPE_HELP = "Number format for computing. [default: float32, in which losses agree to 6e-5]"


def refuse_launched(name: str) -> None:
    """Reject a launch with multiple processes. Each would measure, and start its own processes."""
    if launched_as() > 1:
        raise UsageError(
            f"distgpt bench {name} runs as one process, but was launched as {launched_as()}; "
            "run it without a launcher"
        )


@click.group(cls=Group)
def bench() -> None:
    """Measure training, inference and Allreduce on this machine, and compare stages."""


def result_options(name: str) -> Callable[[F], F]:
    """Add the options for the results. `name` describes the default of --name."""
    return together(
        click.option("--name", help=f"Name of the results. [default: {name}]"),
        click.option("--out", type=PATH, default=Path("bench"), help="Directory for results."),
        json_option,
    )


def to_options(kind: type[T], given: dict[str, Any]) -> T:
    """Return a command's options as its dataclass. Settings of a run that the user set are in `settings`."""
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    settings = set_by_user({key: value for key, value in given.items() if key not in own})
    more = {"settings": settings} if "settings" in own else {}
    return kind(**{key: value for key, value in given.items() if key in own}, **more)


def preset_option(default: str) -> Callable[[F], F]:
    return click.option(
        "--preset", default=default, shell_complete=presets, help="Named configuration (tiny, gpt2, …)."
    )


# The programs in benchmarks/ that measure other software share these options.
train_options = together(
    stage_options, launch_options, preset_option("tiny"), settings, result_options("preset and stage")
)


@bench.command("train", example="distgpt bench train --preset gpt-mini --ranks 2 --stage mpi")
@train_options
@click.option("--measure-peak", is_flag=True, hidden=True)  # set for the processes that this command starts
def train(measure_peak: bool, **given: Any) -> None:
    """Measure training: tokens per second, share of the machine's peak, memory.

    Accepts the settings of distgpt train; --steps defaults to 20.
    """
    from distgpt.measure.bench import train

    options = to_options(train.TrainOptions, given)
    if measure_peak:
        train.measure_peak(options)
    else:
        refuse_launched("train")
        train.bench(options)


DTYPES_INFERRED = ("float32", "bfloat16", *QUANTIZED_DTYPES)


infer_options = together(
    preset_option("gpt2"),
    click.option("--threads", type=Threads(), help="CPU threads. [default: all cores]"),
    click.option(
        "--dtype", "dtypes", type=click.Choice(DTYPES_INFERRED), multiple=True, default=DTYPES_INFERRED
    ),
    click.option(
        "--requests",
        type=POSITIVE,
        multiple=True,
        default=(1, 8, 32),
        help="Concurrent requests; may be repeated.",
    ),
    click.option("--prompt", type=POSITIVE, default=256, help="Prompt length in tokens."),
    click.option("--new", type=click.IntRange(2), default=64, help="Tokens to generate."),
    click.option(
        "--rounds", type=POSITIVE, default=1, help="Number of measurements; the median is reported."
    ),
    result_options("the preset's"),
)


@bench.command("infer", example="distgpt bench infer --preset gpt-mini")
@infer_options
def infer(**given: Any) -> None:
    """Measure generation with random weights: prefill and decoding, for one and many requests."""
    from distgpt.measure.bench import infer

    refuse_launched("infer")
    infer.bench(to_options(infer.InferOptions, given))


@bench.command("allreduce", example="distgpt bench allreduce --ranks 2")
@click.option("--stage", type=click.Choice(["mpi", "mpi-cuda"]), default="mpi")
@launch_options
@click.option("--sizes", metavar="BYTES,…", help="Array sizes, such as 8,64K,16M.")
@click.option("--max-bytes", default="256M", help="Size of the largest array if --sizes is not set.")
@click.option(
    "--algorithms",
    metavar="NAME,…",
    help="Algorithms: allreduce, shared memory, hierarchical; with mpi-cuda: nccl, host.",
)
@click.option("--repeats", type=POSITIVE, default=30, help="Maximum repetitions per size.")
@click.option("--seconds", type=FiniteRange(1), default=60.0, help="Approximate total time in seconds.")
@result_options(name="stage and ranks")
@click.option("--measure-only", is_flag=True, hidden=True)  # set for the ranks that this command starts
def allreduce(**given: Any) -> None:
    """Measure Allreduce, as in every training step, by size and algorithm.

    Starts the ranks itself, unless a launcher such as mpirun started it.
    """
    from distgpt.measure.bench import allreduce

    allreduce.bench(to_options(allreduce.AllreduceOptions, given))


@bench.command("stages", example="distgpt bench stages --ranks 2")
@click.option("--stages", metavar="STAGE,…", help="Stages to run. [default: all available]")
@launch_options
@click.option("--threads", type=Threads(), help="Threads per rank in CPU stages.")
@click.option("--full", is_flag=True, help="Train 50 epochs of the course project instead of 21.")
@click.option(
    "--preset",
    shell_complete=presets,
    help="Train this preset instead of the course project (tiny, gpt2, …).",
)
@click.option("--config", type=PATH, help="Read settings from this TOML file.")
@settings_but("--dtype")
@setting_option("dtype", replace(SETTINGS["dtype"], undecided="", help=DTYPE_HELP), default=None)
@click.option(
    "--gpu-dtype", type=click.Choice(DTYPES), help="Number format of GPU stages. [default: --dtype]"
)
@click.option(
    "--tolerance",
    type=FiniteRange(0),
    help="Maximum relative difference between losses. [default: depends on the number format]",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Run only CPU stages, with --reproducible-parts 8, and require identical losses.",
)
@click.option("--out", type=PATH, default=Path("compare"), help="Directory for the results.")
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
    """Run the same job on every stage and check that their results agree.

    Trains and generates text, each in a separate process; the default workload is the course project. Writes
    compare.json to --out. Exit code 1: losses differ by more than the tolerance, or a stage failed. To
    compare two existing runs, use distgpt compare.
    """
    from distgpt.measure.stages import CompareOptions, compare, find_workload

    refuse_launched("stages")
    if deterministic:
        on_cpu = [stage for stage in STAGES if stage not in ON_GPU]
        if tolerance or not {*(stages or "serial").split(",")} <= {*on_cpu}:
            raise UsageError(f"--deterministic requires stages {' and '.join(on_cpu)} and a tolerance of 0")
        tolerance, stages = 0.0, stages or ",".join(on_cpu)
    how = {key: flags.pop(key) for key in ("ranks", "hostfile", "launcher", "threads")}
    name, run = find_workload(preset, config, set_by_user(flags), full, deterministic)
    how |= {"stages": stages, "gpu_dtype": gpu_dtype or run.train.dtype, "tolerance": tolerance}
    compare(CompareOptions(name, run, **how), out, as_json)

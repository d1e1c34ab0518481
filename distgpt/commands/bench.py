"""distgpt bench: forward, train, infer, allreduce, scaling, report"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from distgpt.comm.launched import launched_as
from distgpt.commands.options import FiniteRange, Group, launch_options, settings, stage_options
from distgpt.config import DTYPES, nearest
from distgpt.errors import UsageError, print_lines
from distgpt.measure.published import METHODS, NAMES

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

ORDER = ("forward", "train", "infer", "allreduce", "scaling", "report")
# A launcher may start several processes of these; of the others only what they start themselves to measure.
TOGETHER = ("forward", "allreduce")
MEASURING = "--measure-peak"


class _Bench(Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(ORDER)

    def get_command(self, context: click.Context, name: str) -> click.Command:
        command = super().get_command(context, name)
        if command is None:
            context.fail(f"no such command {name!r}{nearest(name, ORDER)}")
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(context, args)
        if name not in TOGETHER and MEASURING not in rest and launched_as() > 1:
            raise UsageError(
                f"distgpt bench {name} is for one process, and was launched as {launched_as()}: "
                "run it without a launcher"
            )
        return name, command, rest


@click.group(cls=_Bench)
def bench() -> None:
    """Measure this machine: passes, training, inference, sums over ranks, scaling."""


def result_options(name: str) -> Callable[[F], F]:
    """Where results go; `name` says what they are called without --name."""

    def add(command: F) -> F:
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object."),
            click.option(
                *("--out", "out"),
                type=click.Path(path_type=Path),
                default="bench",
                show_default=True,
                help="Folder for results.",
            ),
            *([click.option("--name", help=f"Name of the results; {name} if left out.")] if name else []),
        ):
            command = option(command)
        return command

    return add


def filled(kind: type[T], given: dict[str, Any]) -> T:
    """A command's options as its dataclass; settings of a run that were given go into its `settings`."""
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    settings = {key: value for key, value in given.items() if key not in own and value is not None}
    more = {"settings": settings} if "settings" in own else {}
    return kind(**{key: value for key, value in given.items() if key in own}, **more)


@bench.command("forward")
@click.option(
    "--preset",
    "presets",
    type=click.Choice(list(NAMES)),
    multiple=True,
    help="Model and work; S if left out.",
)
@click.option("--names", type=click.IntRange(1), help="How many; as many as the study took if left out.")
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Repeatable; all that work here if left out.",
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=("float32",), show_default=True
)
@launch_options
@click.option(
    "--threads", type=click.IntRange(1), help="Of each process; its share of the cores if left out."
)
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes; the median counts."
)
@click.option(
    "--patience",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for all passes of a method, or it is measured on fewer names.",
)
@click.option("--peer", help="A Python with PyTorch; this one if left out.")
@click.option(
    "--sweep",
    type=click.Choice(["input", "model", "joint"]),
    help="Over names; over MS5 to MXL5; over S to XL.",
)
@click.option("--ablation", is_flag=True, help="Also what batches and single precision bring, each alone.")
@result_options(name="")
@click.option("--measure", "measure_only", is_flag=True, hidden=True)  # for the processes that this starts
def forward(**given: Any) -> None:
    """Time the mean loss over thousands of names, one at a time and batched, on cores, ranks and in PyTorch.

    All methods compute with the same weights; a loss that differs from the others' ends the command.
    """
    from distgpt.measure.bench import study

    study.bench(filled(study.ForwardOptions, given))


@bench.command("train")
@stage_options
@launch_options
@click.option("--preset", default="tiny", show_default=True, help="A named configuration.")
@settings
@click.option("--peer", type=click.Choice(["torch"]), help="Train the same model in PyTorch too, in turn.")
@click.option(
    "--peer-python", default=sys.executable, help="A Python that has what --peer names; this one if left out."
)
@click.option(
    *("--peer-mode", "peer_modes"),
    multiple=True,
    default=("keep-freed",),
    show_default=True,
    metavar="MODE",
    help="How PyTorch trains: eager, or some of keep-freed, compile, autotune, autocast joined by +; best "
    "tries them. Repeatable.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Pairs of runs with a peer."
)
@result_options(name="preset and stage")
@click.option(MEASURING, is_flag=True, hidden=True)  # for the processes that this starts
def train(measure_peak: bool, **given: Any) -> None:
    """Train for a few steps: tokens per second, share of the machine's peak, memory, and beside PyTorch.

    Takes the settings of `distgpt train`; --steps is 20 if left out.
    """
    from distgpt.measure.bench import train

    options = filled(train.TrainOptions, given)
    if measure_peak:
        train.measure_peak(options)
    else:
        train.bench(options)


@bench.command("infer")
@click.option("--preset", default="gpt2", show_default=True, help="A named configuration.")
@click.option("--threads", type=click.IntRange(1), help="All cores if left out.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(("float32", "bfloat16", "int8")),
    multiple=True,
    default=("float32", "bfloat16", "int8"),
    show_default=True,
)
@click.option(
    *("--requests", "requests"),
    type=click.IntRange(1),
    multiple=True,
    default=(1, 8, 32),
    show_default=True,
    help="How many at once. Repeatable.",
)
@click.option("--prompt", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a prompt.")
@click.option("--new", type=click.IntRange(2), default=64, show_default=True, help="New tokens.")
@click.option(
    *("--peer", "peers"),
    multiple=True,
    metavar="NAME",
    help="transformers, ctranslate2 or llama.cpp too, in turn. Repeatable.",
)
@click.option("--peer-python", default=sys.executable, help="A Python that has them; this one if left out.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="The middle counts.")
@result_options(name="the preset's")
@click.option("--measure", hidden=True)  # for the processes that this starts
def infer(measure: str | None, **given: Any) -> None:
    """Generate from prompts, one request and many at once: prefill, decode, all, and beside peers.

    Weights are random.
    """
    from distgpt.measure.bench import infer

    if measure is not None:
        infer.measure_own(measure)
    else:
        infer.bench(filled(infer.InferOptions, given))


@bench.command("allreduce")
@click.option("--stage", type=click.Choice(["mpi", "mpi-cuda"]), default="mpi", show_default=True)
@launch_options
@click.option("--sizes", metavar="BYTES,…", help="Sizes of the arrays, in this order, as in 8,64K,16M.")
@click.option("--max-bytes", default="256M", show_default=True, help="Largest size, if --sizes is left out.")
@click.option(
    "--algorithms",
    metavar="NAME,…",
    help="packed, chunked; of mpi-cuda: nccl, host, host-chunked, cuda-aware.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=30, show_default=True, help="Most repetitions of a size."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=60.0, show_default=True, help="About how long, in all."
)
@result_options(name="stage and ranks")
@click.option("--measure-only", is_flag=True, hidden=True)  # for the ranks that this command starts
def allreduce(**given: Any) -> None:
    """Time the sum over ranks that every training step makes, by size and by algorithm.

    Starts the ranks itself, or measures with those of the launcher that it was started by.
    """
    from distgpt.measure.bench import allreduce

    allreduce.bench(filled(allreduce.AllreduceOptions, given))


@bench.command("scaling")
@click.option(
    *("--ranks", "measured_ranks"),
    default="1,2",
    show_default=True,
    metavar="N,…",
    help="Numbers of ranks to measure.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to start them on.")
@click.option("--launcher", help='What starts them: mpirun, or as in "srun --mpi=pmix".')
@click.option("--threads", type=click.IntRange(1), help="Per rank; cores / most ranks if left out.")
@click.option("--preset", help="Start from a named configuration; tiny if left out.")
@settings
@click.option("--strong", is_flag=True, help="Only with the whole batch the same.")
@click.option("--weak", is_flag=True, help="Only with each rank's batch the same.")
@click.option(
    "--predict", default="8,64,1024", show_default=True, metavar="N,…", help="Ranks to predict for."
)
@click.option(
    "--network", metavar="RATE,LATENCY", help="Predict for hosts on another one, as in 1gbit,100us."
)
@click.option(
    "--ranks-per-node", type=click.IntRange(1), default=1, show_default=True, help="With --network."
)
@click.option(
    "--seconds", type=FiniteRange(1), default=10.0, show_default=True, help="About how long for the sums."
)
@result_options(name="the preset's")
def scaling(**given: Any) -> None:
    """Train on 1, 2, … ranks, and predict what 8, 64 or 1,024 would do.

    Strong scaling cuts one batch into more parts; weak scaling gives every rank a batch of that size.
    Predictions come from an α–β model that is fitted to sums over these very ranks.
    """
    from distgpt.measure.bench import scaling

    scaling.bench(filled(scaling.ScalingOptions, given))


@bench.command("report")
@click.argument("folder", metavar="DIR", default=Path("bench"), type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page; DIR/report.html if left out.")
def report(folder: Path, out: Path | None) -> None:
    """Make one HTML page of all results in DIR.

    It needs no network and no scripts: a file to open, to print or to send.
    """
    from distgpt.measure.bench.report import write

    print_lines(write(folder, out))

"""distgpt bench forward"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.options import FiniteRange, launch_options
from distgpt.config import DTYPES
from distgpt.measure.bench.methods import METHODS
from distgpt.measure.bench.study_published import NAMES


@click.command("forward")
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
@click.option(
    "--out", type=click.Path(path_type=Path), default="bench", show_default=True, help="Folder for results."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option("--measure", "measure_only", is_flag=True, hidden=True)  # for the processes that this starts
def bench_forward(
    presets: tuple[str, ...],
    names: int | None,
    methods: tuple[str, ...],
    dtypes: tuple[str, ...],
    ranks: int,
    hostfile: Path | None,
    launcher: str | None,
    threads: int | None,
    repeats: int,
    patience: float,
    peer: str | None,
    sweep: str | None,
    ablation: bool,
    out: Path,
    as_json: bool,
    measure_only: bool,
) -> None:
    """Time the mean loss over thousands of names, one at a time and batched, on cores, ranks and in PyTorch.

    All methods compute with the same weights; a loss that differs from the others' ends the command.
    """
    from distgpt.measure.bench.forward_page import Wanted, bench

    wanted = Wanted(
        presets,
        names,
        list(dict.fromkeys(methods)),
        list(dict.fromkeys(dtypes)),
        ranks,
        hostfile,
        launcher,
        threads or 0,
        repeats,
        patience,
        peer,
        sweep,
        ablation,
    )
    bench(wanted, measure_only, out, as_json)

"""distgpt bench train"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import launch_options, settings, stage_options
from distgpt.config import GpuConfig

DEFAULT_STEPS = 20


@click.command("train")
@stage_options
@launch_options
@click.option("--preset", default="tiny", show_default=True, help="A named configuration.")
@settings
@click.option("--peer", type=click.Choice(["torch"]), help="Train the same model in PyTorch too, in turn.")
@click.option(
    "--peer-python", default=sys.executable, help="A Python that has what --peer names; this one if left out."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Pairs of runs with a peer."
)
@click.option("--name", help="Name of the results; preset and stage if left out.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="bench", show_default=True, help="Folder for results."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
@click.option("--measure-peak", is_flag=True, hidden=True)  # for the processes that this starts
def bench_train(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    ranks: int,
    hostfile: Path | None,
    launcher: str | None,
    preset: str,
    peer: str | None,
    peer_python: str,
    rounds: int,
    name: str | None,
    out: Path,
    as_json: bool,
    measure_peak: bool,
    **flags: Any,
) -> None:
    """Train for a few steps: tokens per second, share of the machine's peak, memory, and beside PyTorch.

    Takes the settings of `distgpt train`; --steps is 20 if left out.
    """
    from distgpt.measure.bench import training

    given = {key: value for key, value in flags.items() if value is not None}
    wanted = training.Wanted(
        preset,
        stage,
        threads,
        ranks,
        hostfile,
        launcher,
        {"steps": DEFAULT_STEPS, **given},
        gpu,
        peer_python if peer else "",
        rounds,
    )
    if measure_peak:
        training.measure_peak(wanted)
    else:
        training.bench(wanted, name or f"{preset}-{stage}", out, as_json)

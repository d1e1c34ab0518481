"""distgpt estimate"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import settings, stage_options
from distgpt.config import GpuConfig


@click.command()
@stage_options
@click.option("--preset", help="Start from a named configuration (tiny, gpt-mini, gpt2, …).")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
@settings
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of the run.")
@click.option("--tokens", help="Tokens to train on in all (300M, 10B), instead of --steps.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Tokens/s of one rank, measured elsewhere.",
)
@click.option(
    "--measure/--no-measure",
    "measured",
    default=None,
    help="Time a few steps here; done where it can be, unless --rate is given.",
)
@click.option("--gpu-memory", type=click.FloatRange(0, min_open=True), help="GiB of each rank's GPU.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def estimate(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    preset: str | None,
    config: Path | None,
    ranks: int,
    tokens: str | None,
    rate: float | None,
    measured: bool | None,
    gpu_memory: float | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Tell what a run would take: memory, disk and time."""
    if tokens is not None and flags["steps"] is not None:
        raise click.UsageError("--tokens and --steps exclude each other")
    from distgpt.comm.serial import SerialComm
    from distgpt.measure.estimate.estimate import Question
    from distgpt.measure.estimate.page import answer
    from distgpt.training.plan import configure

    given = {key: value for key, value in flags.items() if value is not None}
    name, run = configure(SerialComm(), preset, config, given)
    answer(name, Question(run, stage, ranks, threads, gpu, tokens, rate, measured, gpu_memory), as_json)

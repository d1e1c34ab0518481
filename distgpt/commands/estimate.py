"""distgpt estimate"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import (
    deterministic_as_parts,
    preset_options,
    set_by_user,
    settings,
    stage_options,
)
from distgpt.config import GpuConfig
from distgpt.errors import print_lines
from distgpt.formatting import parse_count


@command(example="distgpt estimate --preset gpt2 --batch-tokens 65536 --tokens 2.5B")
@stage_options
@preset_options
@settings
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of the run.")
@click.option("--tokens", help="Tokens to train on in total (300M, 10B), instead of --steps.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Tokens/s of one rank, measured elsewhere."
)
@click.option(
    "--measure/--no-measure",
    "measured",
    default=None,
    help="Time a few steps here; the default where possible, unless --rate is given.",
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
    """Estimate what a run takes: memory, disk and time."""
    if tokens is not None and flags["steps"] is not None:
        raise click.UsageError("--tokens and --steps exclude each other")
    import json

    from distgpt.comm.serial import SerialComm
    from distgpt.measure.estimate import Question, render_terminal
    from distgpt.measure.estimate import estimate as estimated
    from distgpt.training.opening.plan import configure

    gpu, flags = deterministic_as_parts(stage, gpu, flags)
    name, run = configure(SerialComm(), preset, config, set_by_user(flags), fetches=False)
    n_tokens = None if tokens is None else parse_count(tokens, "--tokens")
    question = Question(run, stage, ranks, threads, gpu, n_tokens, rate, measured, gpu_memory)
    facts = estimated(question, partial(print_lines, err=True))
    if as_json:
        print(json.dumps({"name": name, **facts}, indent=1))
    else:
        print_lines(render_terminal(name, facts))

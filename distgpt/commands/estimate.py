"""distgpt estimate"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import (
    deterministic_as_parts,
    dial_options,
    preset_options,
    set_by_user,
    settings,
    stage_options,
)
from distgpt.config import GpuConfig
from distgpt.errors import print_lines, refuse_beside
from distgpt.formatting import parse_count, parse_duration
from distgpt.stages import ON_GPU, open_stage


@command(example="distgpt estimate --preset gpt2 --batch-tokens 65536 --tokens 2.5B")
@stage_options
@preset_options
@settings
@dial_options
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

    from distgpt.measure.estimate import Question, render_terminal
    from distgpt.measure.estimate import estimate as estimated
    from distgpt.show.progress import ItemProgress
    from distgpt.training.opening.dial import DEPTH, TOKENS, WITHIN, Dial
    from distgpt.training.opening.dtype import foreseen
    from distgpt.training.opening.within import with_clock

    say = partial(print_lines, err=True)
    gpu, flags = deterministic_as_parts(stage, gpu, flags)
    chosen = set_by_user(flags)
    here = None  # the stage, where it is open
    if WITHIN in chosen and not preset:
        others = {"no-measure": measured is False, "rate": rate, "ranks 2 or more": ranks > 1}
        refuse_beside("--within", others, "it chooses by the speed of one rank here; --depth names a model")
        here = open_stage("cuda" if stage in ON_GPU else "serial", threads, gpu)
        here, chosen = with_clock(here, preset, config, chosen, None, None, say)
    elif WITHIN in chosen:
        chosen = {**chosen, "train_minutes": parse_duration(str(chosen[WITHIN])) / 60}
    name, run = foreseen(stage, preset, config, chosen, gpu.tf32, ranks)
    if DEPTH in chosen:
        say(Dial(chosen[DEPTH], chosen.get(TOKENS, 0.0), ranks).described(run))
    total = parse_count(tokens, "--tokens") if tokens is not None else None
    question = Question(run, stage, ranks, threads, gpu, total, rate, measured, gpu_memory)
    with closing(ItemProgress("steps", with_tokens=False)) as progress:
        facts = estimated(question, say, progress, here)
    if as_json:
        print(json.dumps({"name": name, **facts}, indent=1))
    else:
        print_lines(render_terminal(name, facts))

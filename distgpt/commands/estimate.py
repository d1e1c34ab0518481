"""distgpt estimate"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
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
from distgpt.core.base.errors import print_lines, refuse_beside
from distgpt.core.base.formatting import parse_count, parse_duration
from distgpt.core.config import ON_GPU, GpuConfig
from distgpt.core.config.asked import Asked, asked_for
from distgpt.core.cpu.stages import open_stage


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

    from distgpt.measure.estimate import Question, foreseen, render_terminal
    from distgpt.measure.estimate import estimate as estimated
    from distgpt.recipes.depth import Dial
    from distgpt.recipes.derived import derived
    from distgpt.recipes.within import with_clock
    from distgpt.show.progress import ItemProgress

    say = partial(print_lines, err=True)
    asked = replace(asked_for(set_by_user(flags), preset, config), fetches=False)
    gpu, asked = deterministic_as_parts(stage, gpu, asked)
    here = None  # the stage, where it is open
    if asked.within is not None and not preset:
        others = {"no-measure": measured is False, "rate": rate, "ranks 2 or more": ranks > 1}
        refuse_beside("--within", others, "it chooses by the speed of one rank here; --depth names a model")
        here = open_stage("cuda" if stage in ON_GPU else "serial", threads, gpu)
        asked = with_clock(asked, here, say)
    elif asked.within is not None:
        asked = _ending_by_clock(asked, parse_duration(asked.within))
    plain = derived(asked, ranks)
    run = foreseen(stage, plain, gpu.tf32)
    if asked.depth is not None:
        say(Dial(asked.depth, asked.tokens, ranks).described(run))
    total = parse_count(tokens, "--tokens") if tokens is not None else None
    question = Question(run, stage, ranks, threads, gpu, total, rate, measured, gpu_memory)
    with closing(ItemProgress("steps", with_tokens=False)) as progress:
        facts = estimated(question, say, progress, here)
    if as_json:
        print(json.dumps({"name": plain.name, **facts}, indent=1))
    else:
        print_lines(render_terminal(plain.name, facts))


def _ending_by_clock(asked: Asked, seconds: float) -> Asked:
    """Return what --within stands for where the model is given."""
    return replace(asked, given={**asked.given, "train_minutes": seconds / 60})

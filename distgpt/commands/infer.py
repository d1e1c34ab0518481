"""distgpt infer"""

from __future__ import annotations

from typing import Any

import click

from distgpt.commands.options import PATH, Typed, number_options, stage_options
from distgpt.config import GpuConfig
from distgpt.machine.stages import open_stage


@click.command()
@stage_options
@click.option("--weights", type=PATH, help="Weights file; a bundled sample if left out.")
@click.option("--prompt", type=Typed(), help="Text to continue.")
@click.option("--prompt-file", type=PATH, help="File with the text to continue; -: standard input.")
@click.option(
    "--max-new-tokens", type=click.IntRange(0), default=200, show_default=True, help="Tokens to generate."
)
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="Sampling temperature; 0: greedy."
)
@click.option("--top-k", type=int, default=0, help="Sample from the k likeliest tokens; 0: from all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens that add up to p.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the sampling.")
@number_options
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Context length, if not that of training; impossible with learned positions.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of streamed text.")
def infer(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
    **request: Any,
) -> None:
    """Generate text from a prompt."""
    if request["prompt"] is not None and request["prompt_file"] is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    from distgpt.infer import Request, infer
    from distgpt.model.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    infer(Request(sampling=sampling, **request), open_stage(stage, threads, gpu), as_json)

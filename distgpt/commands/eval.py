"""distgpt eval"""

from __future__ import annotations

from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import PATH, number_options, stage_options
from distgpt.config import GpuConfig
from distgpt.errors import UsageError, print_lines
from distgpt.stages import open_stage


@command(name="eval", example="distgpt eval --weights runs/mine --val held-out.txt")
@stage_options
@click.option("--weights", type=PATH, required=True, help="The model's weights file.")
@click.option("--val", help="What --data of train takes; of token shards the part for validation.")
@click.option("--hellaswag", type=PATH, help="The benchmark's file, JSON lines.")
@click.option("--val-tokens", type=click.IntRange(0), default=0, help="Tokens of --val to read; 0: all.")
@click.option("--tokens", "old_tokens", type=click.IntRange(0), hidden=True)  # the former name
@click.option("--context", type=click.IntRange(1), help="Context length (not with learned positions).")
@number_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def eval(
    stage: str, threads: int | None, gpu: GpuConfig, old_tokens: int | None, as_json: bool, **options: Any
) -> None:
    """Measure a model on a text, on shards or on HellaSwag."""
    import json

    from distgpt.evaluation.assessment import evaluate, page
    from distgpt.show.progress import ItemProgress

    if options["val"] is None and options["hellaswag"] is None:
        raise UsageError("nothing to evaluate: give --val, --hellaswag or both")
    ready = open_stage(stage, threads, gpu)
    options["val_tokens"] = options["val_tokens"] or old_tokens or 0
    found = evaluate(ready, **options, progress=ItemProgress("sequences"))
    if ready.comm.rank == 0 and as_json:
        print(json.dumps(found, allow_nan=False))
    elif ready.comm.rank == 0:
        print_lines(page(found))

"""distgpt eval"""

from __future__ import annotations

from pathlib import Path

import click

from distgpt.commands.options import stage_options
from distgpt.config import DTYPES, GpuConfig
from distgpt.machine.stages import opened


@click.command(name="eval")
@stage_options
@click.option("--weights", type=click.Path(path_type=Path), required=True, help="The model's weights file.")
@click.option("--val", help="A folder of token shards, of which the validation part is read, or a text.")
@click.option("--hellaswag", type=click.Path(path_type=Path), help="The benchmark's file, JSON lines.")
@click.option(
    "--tokens", type=click.IntRange(0), default=0, help="Read no more than so many of --val; 0: all."
)
@click.option("--context", type=click.IntRange(1), help="Tokens seen at once (not with learned positions).")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def eval(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    weights: Path,
    val: str | None,
    hellaswag: Path | None,
    tokens: int,
    context: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure a model on a text, on shards or on HellaSwag."""
    from distgpt.evaluation.report import Question, evaluate, tell

    question = Question(weights, val, hellaswag, tokens, dtype, context)
    ready = opened(stage, threads, gpu)
    found = evaluate(question, ready)
    if ready.comm.rank == 0:
        tell(found, as_json)

"""distgpt eval"""

from __future__ import annotations

from typing import Any

import click

from distgpt.commands.complete import texts
from distgpt.commands.help import command
from distgpt.commands.model_options import adapter_option, number_options
from distgpt.commands.options import PATH, stage_options
from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import open_stage

# The benchmarks of inference/evaluation/questions.py, and what each option takes.
BENCHMARKS = {
    "hellaswag": "HellaSwag, as hellaswag_val.jsonl.",
    "arc_easy": "ARC's easy questions, as ARC-Easy-Test.jsonl.",
    "arc_challenge": "ARC's challenge, as ARC-Challenge-Test.jsonl.",
    "piqa": "PIQA, as valid.jsonl, with valid-labels.lst beside it.",
    "winogrande": "WinoGrande, as dev.jsonl.",
    "lambada": "LAMBADA, a text on each line, or JSON lines.",
    "mmlu": "MMLU, a folder with dev/ and test/.",
}


def benchmark_options(command: Any) -> Any:
    """Add an option for each benchmark."""
    for name, about in reversed(BENCHMARKS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=PATH, help=about)(command)
    return command


@command(name="eval", example="distgpt eval --weights runs/mine --val held-out.txt")
@stage_options
@click.option(
    "--weights", type=PATH, required=True, help="The model: a weights file, a run, or hub:ORG/NAME."
)
@adapter_option
@click.option(
    "--val", shell_complete=texts, help="What --data of train takes; of token shards the part for validation."
)
@benchmark_options
@click.option(
    "--chats", is_flag=True, help="Take --val for chats, as tune does, and count their answers alone."
)
@click.option("--val-tokens", type=click.IntRange(0), default=0, help="Tokens of --val to read; 0: all.")
@click.option("--context", type=click.IntRange(1), help="Context length (not with learned positions).")
@number_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def eval(stage: str, threads: int | None, gpu: GpuConfig, as_json: bool, **options: Any) -> None:
    """Measure a model on a text, on shards or on benchmarks, in files as their authors publish them."""
    import json

    from distgpt.inference.evaluation.evaluate import evaluate, page
    from distgpt.show.progress import ItemProgress

    benchmarks = {name: path for name in BENCHMARKS if (path := options.pop(name)) is not None}
    if options["val"] is None and not benchmarks:
        raise UsageError("nothing to evaluate: give --val, or a benchmark such as --hellaswag")
    ready = open_stage(stage, threads, gpu)
    found = evaluate(ready, benchmarks=benchmarks, **options, progress=ItemProgress("sequences"))
    if ready.comm.rank == 0 and as_json:
        print(json.dumps(found, allow_nan=False))
    elif ready.comm.rank == 0:
        print_lines(page(found))

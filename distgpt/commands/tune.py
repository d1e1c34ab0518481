"""distgpt tune"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import PATH, setting_option, settings_but, stage_options
from distgpt.commands.train import begin, run_options
from distgpt.config import SETTINGS
from distgpt.errors import UsageError

# What the weights decide, what chats have their own way of, and --init, which is called --weights here.
UNUSED = (
    *("--data", "--tokenizer", "--verify-data/--trust-data", "--shift-windows/--fixed-windows"),
    *("--pack/--no-pack", "--init", "--vocab-size", "--n-layer", "--n-head", "--n-kv-head", "--n-embd"),
    *("--head-dim", "--norm", "--mlp", "--positions", "--rope-base", "--rope-scaling", "--rope-factor"),
    *("--qk-norm/--no-qk-norm", "--qk-norm-gain/--no-qk-norm-gain", "--bias/--no-bias", "--init-weights"),
    *("--value-embeddings/--no-value-embeddings", "--qkv-bias/--no-qkv-bias", "--tied/--untied"),
)


@click.command()
@stage_options
@click.option("--weights", type=PATH, help="The model to tune: a weights file, or a run.")
@click.option(
    "--data",
    help="Learn from these chats: a file of JSON lines, .jsonl or .jsonl.gz, or a folder of them.",
)
@setting_option("epochs", SETTINGS["epochs"], default=None)
@settings_but(*UNUSED)
@click.option("--config", type=PATH, help="Read settings from this TOML file.")
@run_options
def tune(weights: Path | None, data: str | None, **options: Any) -> None:
    """Teach a model chats of your own: it learns their answers alone.

    A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]},
    {"prompt": "...", "completion": "..."} or one of the other shapes in docs/tuning.md. The defaults are 3
    epochs and learning rates for trained weights.
    """
    if options["resume"] is None and (weights is None or data is None):
        raise UsageError("--weights says which model to tune, and --data on what")
    begin(preset=None, chats=True, init=None if weights is None else str(weights), data=data, **options)

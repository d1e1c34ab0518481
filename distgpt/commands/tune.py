"""distgpt tune"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import files
from distgpt.commands.help import Option, command
from distgpt.commands.options import PATH, setting_option
from distgpt.commands.train import train
from distgpt.core.base.errors import UsageError
from distgpt.core.config import SETTINGS, ModelConfig, settings_of

# Options of train that have no meaning here: the weights decide the model, chats have a way of their own.
UNUSED = {
    *(settings_of(ModelConfig).keys() - {"seq_len"}),
    *("data", "tokenizer", "pack", "init"),
    *("preset", "decay_from", "depth", "within"),
}


def as_train(weights: Path | None, data: str | None, **options: Any) -> dict[str, Any]:
    """Return the options of `distgpt train` that mean the same."""
    if options["resume"] is None and (weights is None or data is None):
        raise UsageError("--weights says which model to tune, and --data on what")
    own = {"chats": True, "init": None if weights is None else str(weights), "data": data}
    return {**dict.fromkeys(option.name or "" for option in train.params), **options, **own}


@command(example="distgpt tune --weights model.safetensors --data chats.jsonl --out runs/tuned")
@click.option("--weights", type=PATH, help="The model to tune: a weights file, a run, or hub:ORG/NAME.")
@click.option(
    "--data",
    shell_complete=files,
    help="Learn from these chats: a file of JSON lines, .jsonl or .jsonl.gz, or a folder of them.",
)
@setting_option("epochs", replace(SETTINGS["epochs"], first=True), default=None)
def tune(**options: Any) -> None:
    """Teach a model chats of your own: it learns their answers alone.

    A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]},
    {"prompt": "...", "completion": "..."} or one of the other shapes in docs/how-to/tuning.md. The defaults
    are 3 epochs and learning rates for trained weights.
    """
    assert train.callback is not None
    train.callback(**as_train(**options))


def _own(option: click.Parameter) -> click.Parameter:
    """Return an option of train as it is here: adapters are for the first page of help."""
    own = copy(option)
    if isinstance(own, Option) and own.name == "lora_rank":
        own.first = True
    return own


tune.params += [_own(option) for option in train.params if option.name not in UNUSED]

"""distgpt weights"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

_STORED = ("float32", "bfloat16", "float16")
_noted = partial(click.echo, err=True)


@click.group(name="weights")
def weights() -> None:
    """Bring models from and to transformers, or look into a file."""


@weights.command(name="import")
@click.argument("source", metavar="SOURCE")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The weights file to write.")
@click.option("--tokenizer", help="byte, gpt2, or the path of one; the directory's own if left out.")
def import_(source: str, out: Path, tokenizer: str | None) -> None:
    """Make a weights file of a GPT-2 or Llama model that transformers has saved.

    SOURCE is the directory with config.json and model.safetensors (or its parts), the file itself, or
    hub:ORG/NAME, a repository of the Hugging Face Hub.
    """
    from distgpt.saved.huggingface.importing import import_model

    imported = import_model(source, out, tokenizer, _noted)
    click.echo(imported.page())


@weights.command()
@click.argument("weights", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The directory to make.")
@click.option("--dtype", type=click.Choice(_STORED), default="float32", show_default=True)
def export(weights: Path, out: Path, dtype: str) -> None:
    """Make a directory that transformers loads, as GPT-2 or as Llama, of a weights file."""
    from distgpt.saved.huggingface.exporting import export_model

    exported = export_model(weights, out, dtype, _noted)
    click.echo(exported.page())


@weights.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def info(path: Path, as_json: bool) -> None:
    """Tell what a file or directory is: a model, a checkpoint, a model of transformers."""
    from distgpt.saved.info import tell

    tell(path, as_json)

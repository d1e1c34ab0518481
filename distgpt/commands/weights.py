"""distgpt weights"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from distgpt.commands.help import Group
from distgpt.commands.options import PATH
from distgpt.errors import print_lines

_STORED = ("float32", "bfloat16", "float16")
_note = partial(print_lines, err=True)


@click.group(name="weights", cls=Group)
def weights() -> None:
    """Import models from transformers, export them to it, round them to int8, or describe a file."""


@weights.command(name="import", example="distgpt weights import DIR --out model.safetensors")
@click.argument("source", metavar="SOURCE")
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
@click.option("--tokenizer", help="byte, gpt2, or the path of one; default: the directory's own.")
def import_(source: str, out: Path, tokenizer: str | None) -> None:
    """Import a model saved by transformers as a weights file: GPT-2, Llama, Mistral, Qwen 2 or 3.

    SOURCE is the directory with config.json and model.safetensors (or its parts), the file itself, or
    hub:ORG/NAME, a repository of the Hugging Face Hub.
    """
    from distgpt.saved.huggingface import import_model

    print_lines(import_model(source, out, tokenizer, _note))


@weights.command(example="distgpt weights export runs/mine --out for-transformers")
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The directory to create.")
@click.option("--dtype", type=click.Choice(_STORED), default="float32", show_default=True)
def export(weights: Path, out: Path, dtype: str) -> None:
    """Export a weights file as a directory that transformers loads, as GPT-2, Llama, Qwen 2 or 3."""
    from distgpt.saved.huggingface import export_model

    print_lines(export_model(weights, out, dtype, _note))


@weights.command(example="distgpt weights quantize model.safetensors --out small.safetensors")
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
def quantize(weights: Path, out: Path) -> None:
    """Round a weights file to int8, a quarter of its size; infer and eval then compute in int8."""
    from distgpt.saved.modelfile import quantize

    print_lines(quantize(weights, out))


@weights.command(example="distgpt weights info model.safetensors")
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def info(path: Path, as_json: bool) -> None:
    """Describe a file or directory: a model, a checkpoint, a model of transformers."""
    import json

    from distgpt.saved.info import inspect, page

    found = inspect(path)
    if as_json:
        print(json.dumps({"path": str(path), **found}))
    else:
        print_lines(page(found))

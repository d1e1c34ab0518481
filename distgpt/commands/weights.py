"""distgpt weights"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from distgpt.commands.options import PATH, Group
from distgpt.config import ROUNDED_DTYPES
from distgpt.errors import UsageError, print_lines

_STORED = ("float32", "bfloat16", "float16")
_note = partial(print_lines, err=True)


@click.group(name="weights", cls=Group)
def weights() -> None:
    """Import models from transformers, export them to it, round them, or describe a file."""


@weights.command(name="import")
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


@weights.command()
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The directory to create.")
@click.option("--dtype", type=click.Choice(_STORED), default="float32", show_default=True)
def export(weights: Path, out: Path, dtype: str) -> None:
    """Export a weights file as a directory that transformers loads, as GPT-2, Llama, Qwen 2 or 3."""
    from distgpt.saved.huggingface import export_model

    print_lines(export_model(weights, out, dtype, _note))


@weights.command()
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
@click.option("--dtype", type=click.Choice(ROUNDED_DTYPES), default="int8", show_default=True)
@click.option("--calibrate", type=PATH, help="Round for what such a text makes a model compute (int4).")
def quantize(weights: Path, out: Path, dtype: str, calibrate: Path | None) -> None:
    """Round a weights file to int8, a quarter of its size, or to int4; infer and eval then compute in it."""
    from distgpt.saved.modelfile import quantize

    done = {}
    if calibrate and dtype != "int4":
        raise UsageError("--calibrate is for --dtype int4: int8 needs none")
    if calibrate:
        from distgpt.saved.calibration import calibrated

        done = calibrated(weights, calibrate)
    print_lines(quantize(weights, out, dtype, done))


@weights.command()
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

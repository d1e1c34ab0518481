"""distgpt weights"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from distgpt.commands.options import PATH, Group
from distgpt.errors import print_lines

_STORED = ("float32", "bfloat16", "float16")
_note = partial(print_lines, err=True)


@click.group(name="weights", cls=Group)
def weights() -> None:
    """Import models from transformers, export them to it, round them to int8, or describe a file."""


@weights.command(name="import")
@click.argument("source", metavar="SOURCE")
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
@click.option("--tokenizer", help="byte, gpt2, or the path of one; default: the directory's own.")
@click.option("--weights", type=PATH, help="Of an adapter of PEFT: its model, imported before.")
def import_(source: str, out: Path, tokenizer: str | None, weights: Path | None) -> None:
    """Import a model saved by transformers as a weights file: GPT-2, Llama, Mistral, Qwen 2 or 3.

    SOURCE is the directory with config.json and model.safetensors (or its parts), the file itself, or
    hub:ORG/NAME, a repository of the Hugging Face Hub. It may also be the directory of an adapter saved by
    PEFT.
    """
    from distgpt.saved.huggingface import import_model
    from distgpt.saved.peft import import_adapter, is_adapter

    if is_adapter(source):
        print_lines(import_adapter(source, weights, out, _note))
    else:
        print_lines(import_model(source, out, tokenizer, _note))


@weights.command()
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The directory to create.")
@click.option("--dtype", type=click.Choice(_STORED), default="float32", show_default=True)
def export(weights: Path, out: Path, dtype: str) -> None:
    """Export a weights file as a directory that transformers loads, as GPT-2, Llama, Qwen 2 or 3.

    Of an adapter, or a run with --lora-rank, as one that PEFT loads.
    """
    from distgpt.saved.huggingface import export_model
    from distgpt.saved.modelfile import read_description
    from distgpt.saved.peft import export_adapter
    from distgpt.saved.rundir import find_weights

    own = export_adapter if read_description(find_weights(weights)).base else export_model
    print_lines(own(weights, out, dtype, _note))


@weights.command()
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
def quantize(weights: Path, out: Path) -> None:
    """Round a weights file to int8, a quarter of its size; infer and eval then compute in int8."""
    from distgpt.saved.modelfile import quantize

    print_lines(quantize(weights, out))


@weights.command()
@click.option("--weights", type=PATH, help="The model's weights file; default: the one the adapter names.")
@click.option("--adapter", type=PATH, required=True, help="The adapter, or a run with --lora-rank.")
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
def merge(weights: Path | None, adapter: Path, out: Path) -> None:
    """Merge an adapter into the weights that it was trained beside."""
    from distgpt.comm.serial import SerialComm
    from distgpt.saved.adapter import merge

    print_lines(merge(weights, adapter, out, SerialComm()))


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

"""distgpt weights"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from distgpt.commands.complete import names_or_files, tokenizers
from distgpt.commands.help import Group
from distgpt.commands.options import PATH
from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.config import ROUNDED_DTYPES

_STORED = ("float32", "bfloat16", "float16")
_BLOCKS = ("q8_0", "q4_0")  # of GGUF
_note = partial(print_lines, err=True)


@click.group(name="weights", cls=Group)
def weights() -> None:
    """Import models from transformers and GGUF, export them, round them, or describe a file."""


@weights.command(name="import", example="distgpt weights import DIR --out model.safetensors")
@click.argument("source", metavar="SOURCE", shell_complete=names_or_files("hub:"))
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
@click.option(
    "--tokenizer",
    shell_complete=tokenizers,
    help="byte, gpt2, or the path of one; default: the directory's own.",
)
@click.option("--weights", type=PATH, help="Of an adapter of PEFT: its model, imported before.")
def import_(source: str, out: Path, tokenizer: str | None, weights: Path | None) -> None:
    """Import a model of transformers or llama.cpp as a weights file: GPT-2, Llama, Mistral, Qwen 2 or 3.

    SOURCE is the directory with config.json and model.safetensors (or its parts), the file itself, a file in
    GGUF, or hub:ORG/NAME, a repository of the Hugging Face Hub. It may also be the directory of an adapter
    saved by PEFT.
    """
    from distgpt.models.formats.gguf.container import is_gguf
    from distgpt.models.formats.gguf.transfer import import_gguf
    from distgpt.models.formats.huggingface import import_model
    from distgpt.models.formats.peft import import_adapter, is_adapter

    if is_adapter(source):
        print_lines(import_adapter(source, weights, out, _note))
    elif is_gguf(Path(source)):
        print_lines(import_gguf(Path(source), out, tokenizer, _note))
    else:
        print_lines(import_model(source, out, tokenizer, _note))


@weights.command(example="distgpt weights export runs/mine --out for-transformers")
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The directory to create; a file for GGUF.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(("transformers", "gguf")),
    help="Default: gguf if --out ends in .gguf, else transformers.",
)
@click.option("--dtype", type=click.Choice((*_STORED, *_BLOCKS)), default="float32", show_default=True)
def export(weights: Path, out: Path, kind: str | None, dtype: str) -> None:
    """Export a weights file as GPT-2, Llama, Qwen 2 or 3: a directory that transformers loads, or a file in
    GGUF for llama.cpp, Ollama and LM Studio. GGUF alone has q8_0 and q4_0.

    An adapter, or a run with --lora-rank, becomes a directory that PEFT loads.
    """
    if kind == "gguf" or (kind is None and out.suffix == ".gguf"):
        from distgpt.models.formats.gguf.transfer import export_gguf

        print_lines(export_gguf(weights, out, dtype, _note))
        return
    from distgpt.core.saved.modelfile import read_description
    from distgpt.core.saved.weights import find_weights
    from distgpt.models.formats.huggingface import export_model
    from distgpt.models.formats.peft import export_adapter

    if dtype in _BLOCKS:
        raise UsageError(
            f"transformers has no --dtype {dtype}: add --format gguf, or take one of {', '.join(_STORED)}"
        )
    own = export_adapter if read_description(find_weights(weights)).base else export_model
    print_lines(own(weights, out, dtype, _note))


@weights.command(example="distgpt weights quantize model.safetensors --out small.safetensors")
@click.argument("weights", type=PATH)
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
@click.option("--dtype", type=click.Choice(ROUNDED_DTYPES), default="int8", show_default=True)
@click.option("--calibrate", type=PATH, help="Round for what such a text makes a model compute (int4).")
def quantize(weights: Path, out: Path, dtype: str, calibrate: Path | None) -> None:
    """Round a weights file to int8, a quarter of its size, or to int4; infer and eval then compute in it."""
    from distgpt.models.quantized.rounded import quantize

    done = {}
    if calibrate and dtype != "int4":
        raise UsageError("--calibrate is for --dtype int4: int8 needs none")
    if calibrate:
        from distgpt.models.quantized.calibration import calibrated

        done = calibrated(weights, calibrate)
    print_lines(quantize(weights, out, dtype, done))


@weights.command(example="distgpt weights merge --adapter runs/lora --out merged.safetensors")
@click.option("--weights", type=PATH, help="The model's weights file; default: the one the adapter names.")
@click.option("--adapter", type=PATH, required=True, help="The adapter, or a run with --lora-rank.")
@click.option("--out", type=PATH, required=True, help="The weights file to write.")
def merge(weights: Path | None, adapter: Path, out: Path) -> None:
    """Merge an adapter into the weights that it was trained beside."""
    from distgpt.core.comm.serial import SerialComm
    from distgpt.models.adapters.adapter import merge

    print_lines(merge(weights, adapter, out, SerialComm()))


@weights.command(example="distgpt weights info model.safetensors")
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a page.")
def info(path: Path, as_json: bool) -> None:
    """Describe a file or directory: a model, a checkpoint, a model of transformers."""
    import json

    from distgpt.show.weightspage import inspect, page

    found = inspect(path)
    if as_json:
        print(json.dumps({"path": str(path), **found}))
    else:
        print_lines(page(found))

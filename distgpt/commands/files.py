"""distgpt data, tokenizer and weights"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import Group
from distgpt.commands.options import PATH, POSITIVE, SIZE, json_option, names_or_files, texts, tokenizers
from distgpt.core.base.errors import DataError, UsageError, escape, print_lines
from distgpt.core.base.formatting import count
from distgpt.core.config import QUANTIZED_DTYPES

VAL_FRACTION = 0.05
_FIELD = "Field of a JSON line, or column of a table, with the text."
_max_document = click.option(
    "--max-document",
    default="64MB",
    type=SIZE,
    help="Maximum size of a document: a JSON line or a table entry.",
)
_out_file = click.option("--out", type=PATH, required=True, help="Weights file to write.")


@click.group(name="data", cls=Group)
def data() -> None:
    """Convert text to token shards, or inspect shards."""


@data.command(example="distgpt data prepare texts/ --tokenizer gpt2 --out shards")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", shell_complete=texts)
@click.option(
    "--tokenizer",
    required=True,
    shell_complete=tokenizers,
    help="byte, char, word, gpt2, hub:ORG/NAME, or a path. char and word use the vocabulary of the inputs.",
)
@click.option("--out", required=True, type=PATH, help="Output directory.")
@click.option("--shard-tokens", type=int, default=100_000_000, help="Tokens per shard.")
@click.option(
    "--val-fraction",
    type=float,
    help=f"Fraction of the tokens held out for validation, at most one shard.  [default: {VAL_FRACTION}]",
)
@click.option("--val-shards", type=click.IntRange(0), help="Number of whole shards held out for validation.")
@click.option(
    "--separator",
    default="auto",
    metavar="auto|none|TEXT",
    help="Token between documents. auto: the tokenizer's end of text, or a newline. Escapes: \\n, \\t.",
)
@click.option("--field", default="text", help=_FIELD)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed for shuffling documents.  [default: 0]")
@click.option("--no-shuffle", is_flag=True, help="Keep documents in order; validation takes the first ones.")
@_max_document
@click.option("--workers", type=POSITIVE, help="Tokenizer threads. [default: all cores]")
@click.option("--progress", type=click.Choice(["auto", "live", "plain"]), default="auto")
def prepare(
    inputs: tuple[str, ...],
    val_fraction: float | None,
    seed: int | None,
    no_shuffle: bool,
    max_document: int,
    workers: int | None,
    progress: str,
    **settings: Any,
) -> None:
    """Tokenize documents into shards, so that training need not hold them in memory.

    INPUT is a file, a directory, a bundled text, or - for text or JSON lines from standard input. From a
    directory, it reads all .txt, .md, .jsonl, .txt.gz, .jsonl.gz and .parquet files except hidden ones. It
    shuffles the documents and draws validation documents from all sources. To resume after an interruption,
    repeat the command.
    """
    if val_fraction is not None and settings["val_shards"] is not None:
        raise click.UsageError("--val-fraction and --val-shards cannot be combined")
    if no_shuffle and seed is not None:
        raise click.UsageError("--seed and --no-shuffle cannot be combined")
    from distgpt.core.comm.resources import granted_cores
    from distgpt.core.data.textfile import resolve_data
    from distgpt.corpora.prepare.documents import piped
    from distgpt.corpora.prepare.preparing import Request
    from distgpt.show.datapages import prepare_and_report

    with piped(sys.stdin.buffer) if inputs == ("-",) else nullcontext() as everything:
        request = Request(
            inputs=(everything,) if everything else tuple(map(resolve_data, inputs)),
            val_fraction=VAL_FRACTION if val_fraction is None else val_fraction,
            seed=None if no_shuffle else seed or 0,
            max_document=max(1, max_document),
            workers=workers or granted_cores().whole,
            **settings,
        )
        prepare_and_report(request, progress)


@data.command("info", example="distgpt data info shards")
@click.argument("folder", type=PATH)
@json_option
@click.option("--no-verify", is_flag=True, help="Skip the checksums.")
def data_info(folder: Path, as_json: bool, no_verify: bool) -> None:
    """Describe a directory of shards and verify its checksums."""
    from distgpt.show.datapages import report

    report(folder, as_json, verify=not no_verify)


SAMPLE = "The harbour lay still; it's 1900, naïve café — done."


@click.group(name="tokenizer", cls=Group)
def tokenizer() -> None:
    """Train a tokenizer, or inspect one."""


@tokenizer.command("train", example="distgpt tokenizer train texts/ --vocab-size 8192 --out bpe.json")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", shell_complete=texts)
@click.option("--out", required=True, type=PATH, help="Tokenizer file to write (.json).")
@click.option("--kind", type=click.Choice(["bpe", "char", "word"]), default="bpe")
@click.option("--vocab-size", type=int, help="Vocabulary size of a BPE tokenizer, including the separator.")
@click.option("--min-frequency", type=POSITIVE, help="Minimum count of a merged pair (bpe).  [default: 2]")
@click.option(
    "--separator",
    type=click.Choice(["last", "first", "none"]),
    help="Position of <|endoftext|>, the token between documents, in the vocabulary (bpe).  [default: last]",
)
@click.option("--field", default="text", help=_FIELD)
@_max_document
def tokenizer_train(inputs: tuple[str, ...], max_document: int, **options: Any) -> None:
    """Train a tokenizer on text and save it, for --tokenizer in other commands.

    INPUT is a text file (.txt, .md), JSON lines (.jsonl), either one compressed (.gz), a table (.parquet), a
    directory with these files, or a bundled text.
    """
    from distgpt.core.data.textfile import resolve_data
    from distgpt.corpora.prepare.tokenized import learn_file

    print_lines(learn_file([*map(resolve_data, inputs)], max_document=max(1, max_document), **options))


@tokenizer.command("info", example='distgpt tokenizer info gpt2 --text "The harbour"')
@click.argument("name_or_path", shell_complete=tokenizers)
@click.option("--text", help="Text to tokenize. [default: a sample]")
def tokenizer_info(name_or_path: str, text: str | None) -> None:
    """Describe a tokenizer and show how it splits text.

    NAME_OR_PATH is byte, gpt2, hub:ORG/NAME, a tokenizer file, or a directory with one.
    """
    from distgpt.core.data.tokenizers import BytesDecoder, fingerprint, load_tokenizer

    tokenizer = load_tokenizer(name_or_path)
    separator = tokenizer.separator
    between = "none" if separator is None else f"{separator} {escape(tokenizer.decode([separator]))}"
    print_lines(f"tokenizer    {tokenizer.describe()}")
    print_lines(f"separator    {between}")
    print_lines(f"fingerprint  {fingerprint(tokenizer)}")
    sample = SAMPLE if text is None else text
    try:
        ids = tokenizer.encode(sample).tolist()
    except DataError:
        if text is None:
            return
        raise
    if isinstance(tokenizer, BytesDecoder):  # show partial characters as \xNN
        pieces = [tokenizer.pieces[i].decode("utf-8", "backslashreplace") for i in ids]
    else:
        pieces = [tokenizer.decode([i]) for i in ids]
    size = len(sample.encode())
    rate = f", {size / len(ids):.2f} bytes per token" if ids else ""
    print_lines(f"sample       {count(size, 'byte')} in {count(len(ids), 'token')}{rate}")
    print_lines(f"pieces       {'│'.join(map(escape, pieces))}")
    print_lines(f"ids          {' '.join(map(str, ids))}")


_STORED = ("float32", "bfloat16", "float16")
_BLOCKS = ("q8_0", "q4_0")  # GGUF block formats
_note = partial(print_lines, err=True)


@click.group(name="weights", cls=Group)
def weights() -> None:
    """Import, export, quantize, merge or describe models."""


@weights.command(name="import", example="distgpt weights import DIR --out model.safetensors")
@click.argument("source", metavar="SOURCE", shell_complete=names_or_files("hub:"))
@_out_file
@click.option("--tokenizer", shell_complete=tokenizers, help="byte, gpt2, or a path. [default: the model's]")
@click.option("--weights", type=PATH, help="Imported base model of a PEFT adapter.")
def import_(source: str, out: Path, tokenizer: str | None, weights: Path | None) -> None:
    """Import a GPT-2, Llama, Mistral, Qwen 2 or Qwen 3 model from transformers or llama.cpp.

    SOURCE is a directory with config.json and model.safetensors (possibly in parts), the .safetensors file, a
    .gguf file, hub:ORG/NAME on the Hugging Face Hub, or a directory with a PEFT adapter.
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
@click.option("--out", type=PATH, required=True, help="Directory to create, or a .gguf file.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(("transformers", "gguf")),
    help="Output format. [default: gguf if --out ends in .gguf, otherwise transformers]",
)
@click.option("--dtype", type=click.Choice((*_STORED, *_BLOCKS)), default="float32")
@click.option("--adapter", is_flag=True, help="Write only the adapter to the .gguf file (llama-cli --lora).")
def export(weights: Path, out: Path, kind: str | None, dtype: str, adapter: bool) -> None:
    """Export a model for transformers (a directory) or for llama.cpp, Ollama and LM Studio (a .gguf file).

    The architecture must be GPT-2, Llama, Qwen 2 or Qwen 3. Only GGUF supports q8_0 and q4_0. An adapter, or
    a run trained with --lora-rank, becomes a PEFT directory, or a .gguf file merged with its base model.
    """
    if kind == "gguf" or (kind is None and out.suffix == ".gguf"):
        from distgpt.models.formats.gguf.transfer import export_gguf, export_lora

        if adapter and dtype in _BLOCKS:
            raise UsageError(f"an adapter has no --dtype {dtype}; choose one of {', '.join(_STORED)}")
        print_lines((export_lora if adapter else export_gguf)(weights, out, dtype, _note))
        return
    if adapter:
        raise UsageError("--adapter writes a .gguf file; without it, an adapter becomes a PEFT directory")
    from distgpt.core.saved.modelfile import read_description
    from distgpt.core.saved.weights import find_weights
    from distgpt.models.formats.huggingface import export_model
    from distgpt.models.formats.peft import export_adapter

    if dtype in _BLOCKS:
        raise UsageError(
            f"transformers has no --dtype {dtype}; add --format gguf, or choose one of {', '.join(_STORED)}"
        )
    own = export_adapter if read_description(find_weights(weights)).base else export_model
    print_lines(own(weights, out, dtype, _note))


@weights.command(example="distgpt weights quantize model.safetensors --out small.safetensors")
@click.argument("weights", type=PATH)
@_out_file
@click.option("--dtype", type=click.Choice(QUANTIZED_DTYPES), default="int8")
@click.option("--calibrate", type=PATH, help="Text for calibrating the rounding (int4).")
def quantize(weights: Path, out: Path, dtype: str, calibrate: Path | None) -> None:
    """Quantize a weights file to int8, a quarter of its size, or to int4."""
    from distgpt.models.quantized.packed import calibrated
    from distgpt.models.quantized.rounded import quantize

    if calibrate and dtype != "int4":
        raise UsageError("--calibrate requires --dtype int4")
    print_lines(quantize(weights, out, dtype, calibrated(weights, calibrate) if calibrate else {}))


@weights.command(example="distgpt weights merge --adapter runs/lora --out merged.safetensors")
@click.option("--weights", type=PATH, help="Base model. [default: the one named in the adapter]")
@click.option("--adapter", type=PATH, required=True, help="Adapter, or a run trained with --lora-rank.")
@_out_file
def merge(weights: Path | None, adapter: Path, out: Path) -> None:
    """Merge an adapter into its base model."""
    from distgpt.core.comm.api import SerialComm
    from distgpt.models.adapters import merge

    print_lines(merge(weights, adapter, out, SerialComm()))


@weights.command(example="distgpt weights ensemble runs/a runs/b runs/c --out ensemble.safetensors")
@click.argument("members", type=PATH, nargs=-1, required=True, metavar="WEIGHTS...")
@_out_file
def ensemble(members: tuple[Path, ...], out: Path) -> None:
    """Combine models into one that averages their predictions.

    They need the same architecture and tokenizer, such as runs with different seeds.
    """
    from distgpt.models.ensemble import write_ensemble

    print_lines(write_ensemble(members, out))


@weights.command(example="distgpt weights info model.safetensors")
@click.argument("path", type=PATH)
@json_option
def info(path: Path, as_json: bool) -> None:
    """Describe a weights file, checkpoint, run, or transformers model."""
    from distgpt.show.weightspage import inspect, page

    result = inspect(path)
    print_lines(json.dumps({"path": str(path), **result}) if as_json else page(result))

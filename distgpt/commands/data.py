"""distgpt data"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import texts, tokenizers
from distgpt.commands.help import Group
from distgpt.commands.options import PATH, max_document

VAL_FRACTION = 0.05


@click.group(name="data", cls=Group)
def data() -> None:
    """Make token shards of texts, or inspect them."""


@data.command(example="distgpt data prepare texts/ --tokenizer gpt2 --out shards")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", shell_complete=texts)
@click.option(
    "--tokenizer",
    required=True,
    shell_complete=tokenizers,
    help="byte, gpt2, hub:ORG/NAME, or the path of one; char or word: with the vocabulary of the inputs.",
)
@click.option("--out", required=True, type=PATH, help="The folder for the shards.")
@click.option(
    "--shard-tokens", type=int, default=100_000_000, show_default=True, help="Tokens in each shard."
)
@click.option(
    "--val-fraction",
    type=float,
    help=f"Share of the tokens kept for validation, at most one shard.  [default: {VAL_FRACTION}]",
)
@click.option("--val-shards", type=click.IntRange(0), help="Validation size as a number of whole shards.")
@click.option(
    "--separator",
    default="auto",
    show_default=True,
    metavar="auto|none|TEXT",
    help="Text between documents. auto: the tokenizer's end of text, or \\n, a line break; \\t is a tab.",
)
@click.option(
    "--field", default="text", show_default=True, help="Where a line of JSON, or a table, has the text."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed for shuffling documents.  [default: 0]")
@click.option(
    "--no-shuffle", is_flag=True, help="Keep documents in order; the first tokens are for validation."
)
@max_document
@click.option(
    "--workers", type=click.IntRange(1), help="Threads that tokenize; as many as cores if left out."
)
@click.option("--progress", type=click.Choice(["auto", "live", "plain"]), default="auto", show_default=True)
def prepare(
    inputs: tuple[str, ...],
    val_fraction: float | None,
    val_shards: int | None,
    seed: int | None,
    no_shuffle: bool,
    max_document: int,
    workers: int | None,
    progress: str,
    **settings: Any,
) -> None:
    """Tokenize texts into shards, which training reads without having them in memory.

    INPUT is a file, the name of a bundled text, - for a text or lines of JSON from standard input, or a
    folder, of which all files are taken that end in .txt, .md, .jsonl, .txt.gz, .jsonl.gz or .parquet, except
    hidden ones. The documents are shuffled, and those for validation are drawn from all of them. After an
    interruption the same command resumes.
    """
    if val_fraction is not None and val_shards is not None:
        raise click.UsageError("--val-fraction and --val-shards exclude each other")
    if no_shuffle and seed is not None:
        raise click.UsageError("--seed and --no-shuffle exclude each other")
    from distgpt.core.comm.resources import granted_cores
    from distgpt.core.data.textfile import resolve_data
    from distgpt.corpora.prepare.documents import piped
    from distgpt.corpora.prepare.preparing import Request
    from distgpt.show.datapages import prepare_and_report

    with piped(sys.stdin.buffer) if inputs == ("-",) else nullcontext() as everything:
        request = Request(
            inputs=(everything,) if everything else tuple(map(resolve_data, inputs)),
            val_fraction=VAL_FRACTION if val_fraction is None else val_fraction,
            val_shards=val_shards,
            seed=None if no_shuffle else seed or 0,
            max_document=max_document,
            workers=workers or granted_cores().whole,
            **settings,
        )
        prepare_and_report(request, progress)


@data.command(example="distgpt data info shards")
@click.argument("folder", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a page.")
@click.option("--no-verify", is_flag=True, help="Do not read all shards to find damage.")
def info(folder: Path, as_json: bool, no_verify: bool) -> None:
    """Say what is in a folder of shards, and whether all of it is intact."""
    from distgpt.show.datapages import report

    report(folder, as_json, verify=not no_verify)

"""distgpt tokenizer"""

from __future__ import annotations

from typing import Any

import click

from distgpt.commands.complete import texts, tokenizers
from distgpt.commands.help import Group
from distgpt.commands.options import PATH, LocaleText, max_document
from distgpt.core.base.errors import DataError, escape, print_lines
from distgpt.core.base.formatting import count

SAMPLE = "The harbour lay still; it's 1900, naïve café — done."


@click.group(name="tokenizer", cls=Group)
def tokenizer() -> None:
    """Learn a tokenizer from texts, or inspect one."""


@tokenizer.command(example="distgpt tokenizer train texts/ --vocab-size 8192 --out bpe.json")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", shell_complete=texts)
@click.option("--out", required=True, type=PATH, help="The file to write (.json).")
@click.option("--kind", type=click.Choice(["bpe", "char", "word"]), default="bpe", show_default=True)
@click.option("--vocab-size", type=int, help="Entries of a BPE, with its separator.")
@click.option(
    "--min-frequency",
    type=click.IntRange(1),
    help="How often a pair must occur to become an entry (bpe).  [default: 2]",
)
@click.option(
    "--separator",
    type=click.Choice(["last", "first", "none"]),
    help="Which id <|endoftext|> gets, the token between documents (bpe).  [default: last]",
)
@click.option(
    "--field", default="text", show_default=True, help="Where lines of JSON and tables have the text."
)
@max_document
def train(inputs: tuple[str, ...], **options: Any) -> None:
    """Learn a vocabulary from texts, and save it for the --tokenizer of other commands.

    INPUT is a text (.txt, .md), lines of JSON (.jsonl), both also as .gz, a table (.parquet), a folder with
    such files, or the name of a bundled text.
    """
    from distgpt.core.data.textfile import resolve_data
    from distgpt.corpora.prepare.learn import learn_file

    print_lines(learn_file([*map(resolve_data, inputs)], **options))


@tokenizer.command(example='distgpt tokenizer info gpt2 --text "The harbour"')
@click.argument("name_or_path", shell_complete=tokenizers)
@click.option("--text", type=LocaleText(), help="The text to split; a sample if left out.")
def info(name_or_path: str, text: str | None) -> None:
    """Say what a tokenizer is, and show how it splits a text.

    NAME_OR_PATH is byte, gpt2, hub:ORG/NAME, a tokenizer's file, or a directory with one.
    """
    from distgpt.core.data.tokenizers import BytesDecoder, fingerprint, load_tokenizer

    tokenizer = load_tokenizer(name_or_path)
    print_lines(f"tokenizer    {tokenizer.describe()}")
    separator = tokenizer.separator
    between = "none" if separator is None else f"{separator} {escape(tokenizer.decode([separator]))}"
    print_lines(f"separator    {between}")
    print_lines(f"fingerprint  {fingerprint(tokenizer)}")
    sample = SAMPLE if text is None else text
    try:
        ids = tokenizer.encode(sample).tolist()
    except DataError:
        if text is None:
            return
        raise
    if isinstance(tokenizer, BytesDecoder):  # bytes that are no whole character as \xNN
        pieces = [tokenizer.pieces[i].decode("utf-8", "backslashreplace") for i in ids]
    else:
        pieces = [tokenizer.decode([i]) for i in ids]
    size = len(sample.encode())
    rate = f", {size / len(ids):.2f} bytes per token" if ids else ""
    print_lines(f"sample       {count(size, 'byte')} in {count(len(ids), 'token')}{rate}")
    print_lines(f"pieces       {'│'.join(map(escape, pieces))}")
    print_lines(f"ids          {' '.join(map(str, ids))}")

"""What a tokenizer is, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from distgpt.data.tokenizers.api import BytesDecoder, Tokenizer, fingerprint
from distgpt.errors import DataError, printable
from distgpt.units import count

SAMPLE = "The harbour lay still; it's 1900, naïve café — done."


def about(tokenizer: Tokenizer, text: str | None) -> Iterator[str]:
    """What it is, and how it splits a text: a sample if there is none, as far as it can be encoded."""
    yield f"tokenizer    {tokenizer.describe()}"
    if tokenizer.separator is None:
        yield "separator    none"
    else:
        yield f"separator    {tokenizer.separator} {printable(tokenizer.decode([tokenizer.separator]))}"
    yield f"fingerprint  {fingerprint(tokenizer)}"
    if text is not None:
        yield from _split(tokenizer, text)
    else:
        with suppress(DataError):
            yield from _split(tokenizer, SAMPLE)


def _split(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text).tolist()
    size = len(text.encode())
    rate = f", {size / len(ids):.2f} bytes per token" if ids else ""
    return [
        f"sample       {count(size, 'byte')} in {count(len(ids), 'token')}{rate}",
        f"pieces       {'│'.join(_piece(tokenizer, token_id) for token_id in ids)}",
        f"ids          {' '.join(map(str, ids))}",
    ]


def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one id on one line; bytes that are no whole character as \\xNN."""
    if isinstance(tokenizer, BytesDecoder):
        text = tokenizer.pieces[token_id].decode("utf-8", "backslashreplace")
    else:
        text = tokenizer.decode([token_id])
    return printable(text)

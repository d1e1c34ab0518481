"""A tokenizer for people to look at: what it is, and how it splits a text."""

from __future__ import annotations

from collections.abc import Iterator

from distgpt.core.base.errors import DataError, escape
from distgpt.core.base.formatting import count
from distgpt.core.data.tokenizers import BytesDecoder, Tokenizer, fingerprint

SAMPLE = "The harbour lay still; it's 1900, naïve café — done."


def describe(tokenizer: Tokenizer, text: str | None) -> Iterator[str]:
    """Say what a tokenizer is and how it splits a text, or a sample if that can be encoded."""
    yield f"tokenizer    {tokenizer.describe()}"
    separator = tokenizer.separator
    between = "none" if separator is None else f"{separator} {escape(tokenizer.decode([separator]))}"
    yield f"separator    {between}"
    yield f"fingerprint  {fingerprint(tokenizer)}"
    sample = SAMPLE if text is None else text
    try:
        ids = tokenizer.encode(sample).tolist()
    except DataError:
        if text is None:
            return
        raise
    size = len(sample.encode())
    rate = f", {size / len(ids):.2f} bytes per token" if ids else ""
    yield f"sample       {count(size, 'byte')} in {count(len(ids), 'token')}{rate}"
    yield f"pieces       {'│'.join(_piece(tokenizer, token_id) for token_id in ids)}"
    yield f"ids          {' '.join(map(str, ids))}"


def _piece(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one id on one line; bytes that are no whole character as \\xNN."""
    if isinstance(tokenizer, BytesDecoder):
        return escape(tokenizer.pieces[token_id].decode("utf-8", "backslashreplace"))
    return escape(tokenizer.decode([token_id]))

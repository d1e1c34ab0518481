"""Texts between tokens that no text encodes to, as chats have them: their ids, and where each ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import BytesDecoder, Ids, Tokenizer, id_dtype

Ends = Sequence[int] | NDArray[np.integer]  # positions in a text, in characters


@runtime_checkable
class EncodesParts(Protocol):
    """A tokenizer for which what stands between tokens depends on its place in the whole."""

    def encode_parts(self, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
        """Return what `encode_parts` below returns."""


@runtime_checkable
class KnowsEnds(Protocol):
    """A tokenizer that is no BytesDecoder, and can encode chats."""

    def ends_in(self, text: str, ids: Ids) -> Ends:
        """Return where each id of a text ends in it, in characters."""


def encode_parts(tokenizer: Tokenizer, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
    """Return the ids of texts between tokens that are given as ids, and the position where each ends.

    Positions count the characters of the whole, in which tokens are spelled out.
    """
    if isinstance(tokenizer, EncodesParts):
        return tokenizer.encode_parts(parts)
    dtype = id_dtype(tokenizer.size)
    ids: list[Ids] = [np.empty(0, dtype)]
    ends: list[Ids] = [np.empty(0, np.int64)]
    begin = 0
    for part in parts:
        inside: Ends
        if isinstance(part, str):
            text, found = part, tokenizer.encode(part)
            inside = ends_in(tokenizer, text, found)
        else:
            text, found = tokenizer.decode([part]), np.array([part], dtype)
            inside = [len(text)]
        ids.append(found)
        ends.append(begin + np.asarray(inside, np.int64))
        begin += len(text)
    return np.concatenate(ids), np.concatenate(ends)


def ends_in(tokenizer: Tokenizer, text: str, ids: Ids) -> Ends:
    """Return where each id of a text ends in it, in characters."""
    if isinstance(tokenizer, BytesDecoder):
        # Count characters that have begun: an id may be a part of one.
        begun = np.cumsum(np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80)
        ends = np.cumsum([len(tokenizer.pieces[i]) for i in ids.tolist()], dtype=np.int64)
        if len(ends) and ends[-1] != len(begun):  # a class derived from it encodes something else
            raise DataError(
                f"a tokenizer of kind {tokenizer.kind!r} does not cut a text into its ids: together these"
                " have other bytes, so that nobody knows where a part of a chat ends"
            )
        return begun[ends - 1]
    if not isinstance(tokenizer, KnowsEnds):
        raise DataError(f"a tokenizer of kind {tokenizer.kind!r} cannot encode chats: it has no `ends_in`")
    return tokenizer.ends_in(text, ids)

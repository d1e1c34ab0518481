"""Load `--data` and `--val` as tokens on every rank.

This module loads text files; `Components.text` returns the loaders of other kinds of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from distgpt.core.base.errors import DataError, Say
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches, Tokens, Window, windows_of
from distgpt.core.data.textfile import read_text, refuse_by_name, resolve_data
from distgpt.core.data.tokenizers import (
    AUTO,
    BYTE,
    BytesDecoder,
    Ids,
    Tokenizer,
    can_mean,
    find_kind,
    load_tokenizer,
    tokenizer_from_json,
)

SAMPLED = 1 << 20  # tokens sampled to estimate the bytes per token
DECODED = 1 << 17  # sampled tokens if each has to be decoded
MOST_PIECES, SHORTEST_PIECE = 8, 512  # pieces of a text file for validation, and their tokens


@dataclass(frozen=True, slots=True)
class DataRequest:
    """A request to load data. `existing` is the tokenizer of an existing model.

    `val_fraction` holds out pieces of a text file, or some of multiple documents. Shards have their own
    split.
    """

    data: str
    tokenizer: str = AUTO
    seq_len: int = 1
    val_fraction: float = 0.0
    verify: bool = True  # read all shards first
    splits: tuple[str, ...] = ("train", "val")  # splits of shards; if there are none of these, all
    existing: Tokenizer | None = None
    val: str = ""  # held-out text, replacing a part of `data`
    kind: str = ""  # the kind of text, if a setting chooses it; default: according to the path
    kept: Path = Path("runs/tokenized")  # the directory of tokenized text of other kinds


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens, and their batches and windows. Without `val`, all tokens are for training."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens | None = None
    separator: int | None = None  # the token before each document, or None
    notes: tuple[str, ...] = ()  # warnings about this text
    is_text: ClassVar[bool] = True  # whether a loss has a unit in bytes

    @property
    def held_out(self) -> Tokens:
        """Return the tokens for validation: `val`, or all if there is none."""
        return self.train if self.val is None else self.val

    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        return components().batches(run.train).of_run(self.train, run)

    def held_out_windows(self, seq_len: int, most: int) -> list[Window]:
        """Cut the first `most` tokens for validation (0: all) into windows to score."""
        return windows_of(self.held_out, seq_len, most)


class TextKind(Protocol):
    """A loader for one kind of text."""

    def refuse_missing(self, request: DataRequest) -> None:
        """Raise a DataError if the data cannot be loaded. Reads no text and downloads no tokenizer."""

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        """Load the same corpus on every rank, ignoring `request.val`. Collective."""


def kind_of(data: str) -> str:
    """Return the kind of text that --data or --val names. Raise a DataError if it does not exist."""
    return components().text_kind(data)


def refuse_missing(texts: Iterable[str], tokenizer: str, kind: str = "") -> None:
    """Reject missing files, shards of another tokenizer, and unreadable kinds of files.

    Reads no text and downloads no tokenizer.
    """
    for data in texts:
        components().text(kind or kind_of(data)).refuse_missing(DataRequest(data, tokenizer))
    if tokenizer != AUTO and find_kind(tokenizer)[0] is None:
        load_tokenizer(tokenizer)


def load_corpus(comm: Comm, request: DataRequest, say: Say = lambda text: None) -> Corpus:
    """Load the same corpus on every rank, or raise the same error on all. Collective."""
    if not request.val:
        return load_one(comm, request, say)
    # Check now, because tokenizing the other text may take hours.
    on_root(comm, lambda: refuse_missing([request.val], AUTO, request.kind))
    corpus = load_one(comm, replace(request, splits=("train",)), say)
    others = replace(request, data=request.val, tokenizer=AUTO, existing=corpus.tokenizer, splits=("val",))
    return replace(corpus, val=load_one(comm, others, say).held_out)


def load_one(comm: Comm, request: DataRequest, say: Say) -> Corpus:
    """Load only `request.data`. Collective."""
    kind = request.kind or on_root(comm, lambda: kind_of(request.data))
    return components().text(kind).load(comm, request, say)


def requested_tokenizer(request: DataRequest) -> str | Tokenizer:
    """Return the model's tokenizer, or the name of the requested one."""
    if request.existing is not None and not can_mean(request.tokenizer, request.existing):
        raise DataError(
            f"the model's tokenizer is {request.existing.describe()}, not {request.tokenizer!r};"
            f" use --tokenizer {AUTO}"
        )
    return request.existing or (BYTE if request.tokenizer == AUTO else request.tokenizer)


class _PlainText:
    """A loader for a UTF-8 file. Rank 0 reads and tokenizes it, then broadcasts the ids as one buffer."""

    def refuse_missing(self, request: DataRequest) -> None:
        refuse_by_name(resolve_data(request.data))

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        of_root: list[tuple[Tokenizer, Ids]] = []

        def read() -> tuple[str, str, int, int]:
            """Return the tokenizer, the dtype and number of ids, and the number of held-out ids."""
            path = resolve_data(request.data)
            refuse_by_name(path)
            text = read_text(path)
            choice = requested_tokenizer(request)
            tokenizer = choice if isinstance(choice, Tokenizer) else load_tokenizer(choice, text)
            try:
                ids = tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            if len(ids) and int(ids.max()) >= tokenizer.size:
                size = f"{tokenizer.kind} has {tokenizer.size} entries"
                raise DataError(f"{path}: the tokenizer {size}, but returned ID {ids.max()}")
            held_out = round(len(ids) * request.val_fraction)
            if len(ids) - held_out < 2 or (request.val_fraction and held_out < 2):
                aside = f", {held_out} of them for validation" if request.val_fraction else ""
                raise DataError(
                    f"{path} has only {count(len(ids), 'token')}{aside}; at least 2 are required for each use"
                    f" (fewer than seq_len + 1 = {request.seq_len + 1} are repeated)"
                )
            of_root.append((tokenizer, ids))
            return tokenizer.to_json(), ids.dtype.name, len(ids), held_out

        saved, dtype, length, held_out = on_root(comm, read)
        tokenizer: Tokenizer
        ids: Ids
        if of_root:  # rank 0 has both; parsing a large vocabulary takes seconds
            tokenizer, ids = of_root[0]
        else:
            tokenizer = tokenizer_from_json(saved, "rank 0's tokenizer")
            ids = np.empty(length, dtype)
        comm.broadcast(ids)
        val, train = split(ids, held_out)
        held_out_part = ArrayTokens(val) if len(val) else None
        return Corpus(tokenizer, ArrayTokens(train), held_out_part)


def split(ids: Ids, held_out: int) -> tuple[Ids, Ids]:
    """Return tokens for validation, in pieces from the whole text unless they are few, and the others.

    The start of a text alone may be unlike the rest, such as a preface.
    """
    pieces = max(1, min(MOST_PIECES, held_out // SHORTEST_PIECE))
    in_val = np.zeros(len(ids), bool)
    for i in range(pieces):
        first = len(ids) * i // pieces
        in_val[first : first + held_out * (i + 1) // pieces - held_out * i // pieces] = True
    return ids[in_val], ids[~in_val]


def text_bytes(ids: Ids, tokenizer: Tokenizer) -> int:
    """Return the length of these tokens' text in UTF-8, without separators between documents."""
    ids = ids[ids != tokenizer.separator]
    if isinstance(tokenizer, BytesDecoder):  # its ids may be parts of characters
        lengths = np.array([len(piece) for piece in tokenizer.pieces])
        return int(lengths[ids].sum())
    return len(tokenizer.decode(ids).encode())


def bytes_per_token(corpus: Corpus, batches: Batches) -> float | None:
    """Return the bytes per token of the training text; None if it has none."""
    if not corpus.is_text:
        return None
    ids = batches.sample(SAMPLED)
    tokenizer = corpus.tokenizer
    if not isinstance(tokenizer, BytesDecoder):
        ids = ids[:DECODED]
    return text_bytes(ids, tokenizer) / len(ids) or None


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """Convert a loss in nats per token to bits per byte; None if either input is unknown."""
    if loss is None or not bytes_per_token:
        return None
    return loss / math.log(2) / bytes_per_token


PLAIN_TEXT = _PlainText()

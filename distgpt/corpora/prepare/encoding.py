"""From pieces of documents to ids, on several threads and in order; what stands between documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import Ids, Tokenizer, id_dtype
from distgpt.corpora.prepare.documents import Piece, parts
from distgpt.corpora.prepare.progress import Counts

T = TypeVar("T")
R = TypeVar("R")
AUTO, NONE = "auto", "none"
ESCAPES = {"\\n": "\n", "\\t": "\t"}  # which are hard to type in a shell
AHEAD = 3  # items per worker that are under way
LARGEST_QUEUE = 1 << 26  # bytes under way, beyond which no more items are read


def in_order(
    work: Callable[[T], R], items: Iterable[T], bytes_of: Callable[[T], int], workers: int
) -> Generator[R, None, None]:
    """Yield `work(item)` for each item, in order. One worker needs no thread.

    Threads suffice: what takes long (BPE, decompressing, hashing) releases the interpreter lock.
    """
    if workers == 1:
        yield from map(work, items)
        return
    todo = iter(items)
    under_way: deque[tuple[int, Future[R]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        while True:
            while (
                len(under_way) < AHEAD * workers
                and sum(size for size, _ in under_way) < LARGEST_QUEUE
                and (item := next(todo, None)) is not None
            ):
                under_way.append((bytes_of(item), pool.submit(work, item)))
            if not under_way:
                return
            yield under_way.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Separator:
    """`ids` stand before each document; where they only separate, not before the first one."""

    ids: tuple[int, ...]
    only_between: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one piece, and how many of them each document in it has."""

    piece: Piece
    ids: Ids
    counts: Counts
    lengths: list[int]


def encode(piece: Piece, tokenizer: Tokenizer, field: str) -> Encoded:
    """Return the ids of a piece. Threads may share the tokenizer."""
    ids: list[Ids] = [np.empty(0, id_dtype(tokenizer.size))]
    counts, lengths = Counts(), []
    for part in parts(piece, field):
        try:
            ids.append(tokenizer.encode(part.text))
        except DataError as error:
            raise DataError(f"{piece.source}: {error}") from None
        lengths.append(len(ids[-1]))
        counts += Counts(part.begins, len(part.text.encode()), part.replaced)
    return Encoded(piece, np.concatenate(ids), counts, lengths)


def find_separator(choice: str, tokenizer: Tokenizer) -> Separator:
    """auto: the tokenizer's own token before each document, else a line break between them, where it can."""
    if choice == NONE:
        return Separator((), only_between=True)
    if choice == AUTO and tokenizer.separator is not None:
        return Separator((tokenizer.separator,), only_between=False)
    text = "\n" if choice == AUTO else choice
    for spelled, meant in ESCAPES.items():
        text = text.replace(spelled, meant)
    try:
        ids = tokenizer.encode(text)
    except DataError as error:
        if choice == AUTO:
            return Separator((), only_between=True)
        raise UsageError(f"--separator {choice!r}: {error}") from None
    return Separator(tuple(ids.tolist()), only_between=True)

"""Pieces of input to token ids, on several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distgpt.checked import Count
from distgpt.data.prepare.documents import Offset, Piece, parts
from distgpt.data.tokenizers.naming import Ids, Tokenizer, id_dtype
from distgpt.errors import DataError, UsageError

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
class Counts:
    documents: Count = 0
    text_bytes: Count = 0
    replaced: Count = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.replaced + other.replaced,
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one piece, and how many of them each document in it has.

    `begins` says that the first document begins here. Else it continues from the piece before.
    """

    place: Offset
    next: Offset
    consumed: int
    ids: Ids
    counts: Counts
    lengths: list[int]
    begins: bool

    def tally(self, sources: list[list[int]]) -> None:
        """Add documents and tokens to those of its input."""
        source = sources[self.place.input]
        source[0] += self.counts.documents
        source[1] += sum(self.lengths)


class Encoder:
    """Turns pieces into ids. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, field: str) -> None:
        self._tokenizer, self._field = tokenizer, field

    def __call__(self, piece: Piece) -> Encoded:
        ids: list[Ids] = [np.empty(0, id_dtype(self._tokenizer.size))]
        counts, lengths = Counts(), []
        for part in parts(piece, self._field):
            try:
                ids.append(self._tokenizer.encode(part.text))
            except DataError as error:
                raise DataError(f"{piece.source}: {error}") from None
            lengths.append(len(ids[-1]))
            counts += Counts(part.begins, len(part.text.encode()), part.replaced)
        whole = np.concatenate(ids)
        return Encoded(piece.place, piece.next, piece.consumed, whole, counts, lengths, piece.begins)


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

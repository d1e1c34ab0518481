"""Best-fit packing: rows start with a document, and few documents are cut.

A row has T + 1 tokens. Longer documents are split into parts of that size and a remainder. A row repeatedly
takes the longest part that fits. If none fits, the shortest part fills it and loses its end. All documents of
the corpus are candidates, so every epoch has the same rows in a different order. The last row is filled with
the start of the corpus.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import Batches, Tokens
from distgpt.core.data.loading import Corpus, DataRequest, kind_of
from distgpt.core.ops.api import Array

AT_ONCE = 1 << 22  # tokens searched at a time
NO_DOCUMENTS = (
    "--pack requires documents and a separator token; pass documents (a directory, .jsonl, .parquet) as"
    " --data and --tokenizer gpt2 or a BPE, or prepare shards with --separator auto"
)

Row = list[tuple[int, int]]  # for each piece: length of its part, and number of tokens taken


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of all rows. Row r has pieces [ends[r], ends[r + 1]); `cut_off` tokens are in no row."""

    starts: Array  # int64
    lengths: Array  # int32
    ends: Array  # int64
    cut_off: int

    def __len__(self) -> int:
        return len(self.ends) - 1

    def row(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each piece of a row."""
        pieces = slice(*self.ends[number : number + 2].tolist())
        return zip(self.starts[pieces].tolist(), self.lengths[pieces].tolist(), strict=True)


class PackedBatches(Batches):
    """The global batches of a run with packed rows."""

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int, separator: int) -> None:
        super().__init__(tokens, seq_len, batch_size, seed, shift=False)
        room = seq_len + 1
        parts = part_starts(document_starts(tokens, separator), len(tokens), room)
        self.plan = pack(parts, len(tokens), room)
        self.windows_per_epoch = len(self.plan)

    def notes(self, steps: int) -> Iterator[str]:
        yield from super().notes(steps)
        rows, cut_off = count(len(self.plan), "sequence"), self.plan.cut_off / self.n_tokens
        yield f"--pack: {rows}; {cut_off:.1%} of the tokens are dropped, at document ends that do not fit"

    def _starts(self, step: int, which: slice) -> Array:
        return self._order(step, which)[0].astype(np.int64)

    def _window(self, start: int) -> Array:
        pieces = [self._tokens.read(begin, begin + length) for begin, length in self.plan.row(start)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class PackedCorpus(Corpus):
    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        separator, t = self.separator, run.train
        if separator is None:
            raise collective_error(UsageError(NO_DOCUMENTS))
        length = run.model.seq_len
        return on_every_rank(comm, lambda: PackedBatches(self.train, length, t.batch_size, t.seed, separator))


class _Packed:
    """The data kind of --pack: the kind that fits the path, with packed batches."""

    def refuse_missing(self, request: DataRequest) -> None:
        components().text(kind_of(request.data)).refuse_missing(request)

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        kind = on_root(comm, lambda: kind_of(request.data))
        result = components().text(kind).load(comm, request, say)
        if kind == "mixture":  # which loads each source with this class
            return result
        return PackedCorpus(result.tokenizer, result.train, result.val, result.separator, result.notes)


PACKED = _Packed()


def document_starts(tokens: Tokens, separator: int) -> Array:
    """Return the starts of documents (int64): separators, and 0, since the corpus may start inside one."""
    result = [np.zeros(1, np.int64)]
    for start in range(0, len(tokens), AT_ONCE):
        ids = tokens.read(start, min(start + AT_ONCE, len(tokens)))
        result.append(np.flatnonzero(ids == separator) + start)
    starts = np.concatenate(result)
    if len(starts) == 1:
        raise DataError(f"--pack requires documents, but the corpus has no separator (token {separator})")
    return starts[1:] if starts[1] == 0 else starts


def part_starts(starts: Array, tokens: int, room: int) -> Array:
    """Return where parts of documents start; no part is longer than a row."""
    counts = -(-np.diff(starts, append=tokens) // room)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    parts: Array = np.repeat(starts, counts) + room * (np.arange(counts.sum()) - before)
    return parts


def pack(starts: Array, tokens: int, room: int, whole: bool = False) -> Plan:
    """Return the plan for parts that start at `starts` in a corpus of `tokens` tokens.

    With `whole`, parts are not cut, and rows may end with free space. Rows depend only on lengths, and equal
    rows are consecutive. Each run of them is computed once, so the work grows with the number of lengths.
    """
    lengths = np.diff(starts, append=tokens)
    order = np.argsort(lengths, kind="stable")
    sizes, first = np.unique(lengths[order], return_index=True)
    left = dict(zip(sizes.tolist(), np.diff(first, append=len(order)).tolist(), strict=True))
    taken = dict(zip(sizes.tolist(), first.tolist(), strict=True))  # next index in `order`, by length
    chosen, taken_of, per_row = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.zeros(1, np.int64)]
    for row, repeats in _runs(left, room, whole):
        chosen.append(order[_documents(row, repeats, taken)])
        taken_of.append(np.tile(np.array([length for _, length in row], np.int32), repeats))
        per_row.append(np.full(repeats, len(row)))
    begins, pieces = starts[np.concatenate(chosen)], np.concatenate(taken_of)
    cut_off = tokens - int(pieces.sum(dtype=np.int64))
    missing = 0 if whole else -int(pieces.sum(dtype=np.int64)) % room
    filler = np.array([*([tokens] * (missing // tokens)), missing % tokens], np.int32)
    filler = filler[filler > 0]
    per_row[-1][-1] += len(filler)
    return Plan(
        np.append(begins, np.zeros(len(filler), np.int64)),
        np.append(pieces, filler),
        np.cumsum(np.concatenate(per_row)),
        cut_off,
    )


def _runs(left: dict[int, int], room: int, whole: bool) -> Iterator[tuple[Row, int]]:
    """Yield each distinct row and its number of repeats. `left`: number of parts by length."""
    sizes = sorted(left)
    while sizes:
        row: Row = []
        missing = room
        while missing and sizes:
            at = bisect_right(sizes, missing) - 1  # the longest that fits, otherwise the shortest
            if at < 0 and whole:
                break
            size = sizes[at := max(0, at)]
            row.append((size, min(size, missing)))
            missing -= row[-1][1]
            left[size] -= 1
            if not left[size]:
                del sizes[at]
        used = Counter(size for size, _ in row)
        more = min(left[size] // times for size, times in used.items())
        for size, times in used.items():
            left[size] -= more * times
        sizes = [size for size in sizes if left[size]] if more else sizes
        yield row, 1 + more


def _documents(row: Row, repeats: int, taken: dict[int, int]) -> Array:
    """Return the indices in `order` of the parts of these rows, piece by piece, and advance `taken`."""
    used = Counter(size for size, _ in row)
    so_far: defaultdict[int, int] = defaultdict(int)
    result = np.empty((repeats, len(row)), np.int64)
    for piece, (size, _) in enumerate(row):
        result[:, piece] = taken[size] + so_far[size] + used[size] * np.arange(repeats)
        so_far[size] += 1
    for size, times in used.items():
        taken[size] += times * repeats
    return result.reshape(-1)

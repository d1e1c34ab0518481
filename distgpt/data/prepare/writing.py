"""Shards of documents, shuffled or in the order of reading, with the right number of tokens for validation.

First all documents are tokenized into a spool (spool.py), then taken out of it in the order of their keys. So
the shuffle is one of all documents, in bounded memory, and everything is counted before the first shard.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.data.prepare.documents import MAX_DOCUMENT, Piece, pieces
from distgpt.data.prepare.encoding import Counts, Encoded, Encoder, Separator, in_order
from distgpt.data.prepare.inputs import Input
from distgpt.data.prepare.progress import Progress, Settings
from distgpt.data.prepare.spool import Spool, SpoolReader, files_for
from distgpt.data.shardfile import ShardReader, ShardWriter, shard_name
from distgpt.data.tokenizers.naming import Ids, Tokenizer, fingerprint, id_dtype
from distgpt.errors import UsageError
from distgpt.formatting import count
from distgpt.kernels.api import Array

LEAST = 2  # tokens: one to see, one to predict
EVERY, EACH = 1 << 24, 1 << 18  # tokens from one note of the progress to the next; more for each file
PARTS = 16  # of validation: a longer document gives a share of its own tokens
LEAST_SHARE = 64  # tokens that make sense on their own

AT_ONCE = 1 << 20  # ids that are read together, or a few more

# File of the spool; of each document in it the first id, their number, and whether the document begins there.
_Spans = tuple[int, Array, Array, Array]


@dataclass(frozen=True, slots=True)
class Request:
    """`val_shards`, if given, counts whole shards for validation, instead of a fraction of the tokens.

    Without a `seed` the documents stay in the order in which they are read.
    """

    inputs: tuple[Path | Input, ...]
    tokenizer: str
    out: Path
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.05
    val_shards: int | None = None
    separator: str = "auto"
    field: str = "text"
    seed: int | None = 0
    max_document: int = MAX_DOCUMENT
    workers: int = 1

    def __post_init__(self) -> None:
        if self.shard_tokens < LEAST:
            raise UsageError(f"--shard-tokens is {self.shard_tokens}: it must be at least {LEAST}")
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"--val-fraction is {self.val_fraction}: it must lie in [0, 1)")

    def settings(self, tokenizer: Tokenizer | None) -> Settings:
        """What the shards depend on, besides the inputs."""
        made = f"{tokenizer.describe()} ({fingerprint(tokenizer)[:16]})" if tokenizer else self.tokenizer
        return {
            "tokenizer": made,
            "shard_tokens": self.shard_tokens,
            "val_fraction": self.val_fraction if self.val_shards is None else None,
            "val_shards": self.val_shards,
            "separator": self.separator,
            "field": self.field,
            "seed": self.seed,
        }

    def held_out(self, tokens: int) -> int:
        """How many of so many tokens are for validation."""
        if self.val_shards is not None:
            return self.val_shards * self.shard_tokens
        held_out = min(int(self.val_fraction * tokens), self.shard_tokens)
        return held_out if held_out >= LEAST else 0


class Watcher(Protocol):
    """Shows the progress of the work."""

    def began(self, total_bytes: int, of: str, label: str = "") -> None: ...

    def advanced(self, consumed: int, tokens: int) -> None: ...

    def noted(self, text: str) -> None: ...


class Preparation:
    """Puts the ids of the pieces into shards, and says in `progress` how far it is."""

    def __init__(
        self,
        request: Request,
        inputs: list[Input],
        tokenizer: Tokenizer,
        progress: Progress,
        separator: Separator,
        watcher: Watcher,
    ) -> None:
        self._request, self._inputs, self._tokenizer = request, inputs, tokenizer
        self._progress, self._separator, self._watcher = progress, separator, watcher
        self._dtype = np.dtype(id_dtype(tokenizer.size)).newbyteorder("<").str
        self._total = sum(source.bytes for source in inputs)
        self._writer: ShardWriter | None = None
        self._split, self._room = "", 0  # of the shard being written

    def run(self) -> None:
        """Write all shards, or those that are missing. `progress` then describes all of them."""
        request, progress = self._request, self._progress
        if progress.complete:
            self._check_finished()
            return
        sizes = progress.spooled or [[0, 0] for _ in range(files_for(self._total))]
        self._spool = Spool(request.out, self._dtype, request.seed, sizes)
        if progress.held_out is None:
            self._fill_spool()
        self._write_all()
        progress.complete = True
        progress.save(self._request.out)
        self._spool.remove()

    # Into the spool

    def _fill_spool(self) -> None:
        progress, spool = self._progress, self._spool
        every = min(self._request.shard_tokens, EVERY + EACH * len(spool.sizes))
        counts, tallies = progress.counts, progress.tallies()
        tokens = noted = sum(pair[1] for pair in tallies)
        self._watcher.began(self._total, self._tokenizer.describe())
        with self._encoded() as results:
            for encoded in results:
                spool.add(counts.documents - (not encoded.begins), encoded.lengths, encoded.ids)
                counts += encoded.counts
                encoded.tally(tallies)
                tokens += len(encoded.ids)
                if tokens - noted >= every:
                    self._note(encoded, counts, tallies)
                    noted = tokens
                self._watcher.advanced(encoded.consumed, tokens)
        progress.counts, progress.sources, progress.spooled = counts, tallies, spool.flush()
        tokens = max(0, self._with_separators() - self._dropped())
        progress.held_out = min(self._request.held_out(tokens), tokens)
        progress.save(self._request.out)

    def _encoded(self) -> closing[Generator[Encoded, None, None]]:
        """The ids of the pieces that are left."""
        request = self._request
        todo = pieces(self._inputs, request.field, self._progress.place, request.max_document)
        return closing(in_order(Encoder(self._tokenizer, request.field), todo, Piece.size, request.workers))

    def _note(self, last: Encoded, counts: Counts, tallies: list[list[int]]) -> None:
        progress = self._progress
        progress.spooled = self._spool.flush()
        progress.place, progress.counts = last.next, counts
        progress.sources = [list(pair) for pair in tallies]
        progress.save(self._request.out)

    def _with_separators(self) -> int:
        """Ids of all documents, a separator beside each."""
        tokens = sum(tokens for tokens, _ in self._spool.sizes)
        return tokens + len(self._separator.ids) * self._progress.counts.documents

    def _dropped(self) -> int:
        """Ids of a separator that does not stand before the first document."""
        return len(self._separator.ids) * self._separator.only_between

    # Out of the spool

    def _write_all(self) -> None:
        progress = self._progress
        self._check_finished()
        width = np.dtype(self._dtype).itemsize
        documents = count(progress.counts.documents, "document")
        label = "writing" if self._request.seed is None else "shuffling"
        self._watcher.began(self._with_separators() * width, documents, label)
        self._done = 0
        try:
            self._write("val", progress.held_out or 0)
            self._write("train", 2 * self._with_separators())  # all there is
        finally:
            self._discard()

    def _write(self, split: str, left: int) -> None:
        """Write this many ids of a split, or what finished shards do not hold of them."""
        skip = self._progress.tokens(split)
        if split == "train" and self._request.seed is None:  # its stream begins with those for validation
            skip += self._progress.held_out or 0
        width, total = np.dtype(self._dtype).itemsize, self._with_separators()
        for ids in self._stream(split):
            ids = ids[:left]
            left -= len(ids)
            self._done += len(ids)
            skipped = min(skip, len(ids))
            skip, ids = skip - skipped, ids[skipped:]
            while len(ids):
                ids = ids[self._put(self._writer or self._begin(split, len(ids) + left), ids) :]
                if not self._room:
                    self._finish()
                self._watcher.advanced(min(self._done, total) * width, self._done)
        self._finish()

    def _stream(self, split: str) -> Iterator[Ids]:
        """The ids of a split, a separator before each document, and before the rest of one that was cut."""
        is_first = True
        for file, spans in groupby(self._spans(split), key=itemgetter(0)):
            with self._spool.reader(file) as reader:
                for _, starts, lengths, is_whole in spans:
                    lead = np.full(len(starts), len(self._separator.ids))
                    if is_first and (self._separator.only_between or not is_whole[0]):
                        lead[0] = 0
                    is_first = False
                    yield from self._blocks(reader, starts, lengths, lead)

    def _blocks(self, reader: SpoolReader, starts: Array, lengths: Array, lead: Array) -> Iterator[Ids]:
        """The ids of these documents, about `AT_ONCE` at a time. `lead`: ids of the separator before each."""
        starts, lengths, lead = _in_pieces(starts, lengths, lead)
        ends = np.cumsum(lead + lengths)
        cuts = np.flatnonzero(np.diff(ends // AT_ONCE)) + 1
        for first, stop in pairwise([0, *cuts.tolist(), len(ends)]):
            some, begin = slice(first, stop), ends[first] - lengths[first] - lead[first]
            at = (ends - lengths)[some] - begin
            ids = np.empty(ends[stop - 1] - begin, self._dtype)
            for back, token in enumerate(reversed(self._separator.ids), 1):
                ids[at[lead[some] > 0] - back] = token
            reader.read(ids, at.tolist(), starts[some].tolist(), lengths[some].tolist())
            yield ids

    def _spans(self, split: str) -> Iterator[_Spans]:
        """Return the parts of documents that belong to a split, in the order of their keys.

        Without a shuffle they are all documents, of which the first ids are for validation. Else validation
        takes the same share from the start of every long document, and fills up with short ones. So every
        long document contributes, and each is cut at most once.
        """
        if self._request.seed is None:
            for file in range(len(self._spool.sizes)):
                for starts, lengths in self._spool.documents(file):
                    yield file, starts, lengths, np.ones(len(starts), bool)
            return
        between, total = len(self._separator.ids), max(1, self._with_separators())
        held_out = (self._progress.held_out or 0) + self._dropped() if self._progress.held_out else 0
        least = self._least_of_long(held_out, total)
        long_so_far, left = 0, held_out - held_out * self._tokens_of_long(least) // total
        for file in range(len(self._spool.sizes)):
            for starts, lengths in self._spool.documents(file):
                tokens = lengths + between
                short = np.where(tokens < least, tokens, 0)
                given = np.clip(left - np.cumsum(short) + short, 0, short)
                left -= int(given.sum())
                for i in np.flatnonzero(tokens >= least).tolist():  # not in 64 bits
                    before, long_so_far = long_so_far, long_so_far + int(tokens[i])
                    given[i] = held_out * long_so_far // total - held_out * before // total
                cut = np.maximum(given - between, 0)
                if split == "val" and len(some := np.flatnonzero(given)):
                    yield file, starts[some], cut[some], np.ones(len(some), bool)
                elif split == "train" and len(some := np.flatnonzero(given < tokens)):
                    yield file, (starts + cut)[some], (lengths - cut)[some], (cut == 0)[some]

    def _tokens_of_long(self, least: int) -> int:
        """Ids of all long documents, a separator beside each."""
        files = range(len(self._spool.sizes))
        parts = chain.from_iterable(map(self._spool.documents, files))
        every = (lengths + len(self._separator.ids) for _, lengths in parts)
        return sum(int(tokens[tokens >= least].sum()) for tokens in every)

    def _least_of_long(self, held_out: int, total: int) -> int:
        """How many ids, its separator among them, a document has that gives a share of them to validation."""
        if not held_out:
            return total + 1
        share = (LEAST_SHARE + len(self._separator.ids)) * total
        return max(held_out // PARTS + 1, -(-share // held_out))

    def _check_finished(self) -> None:
        for shard in self._progress.shards:
            ShardReader(self._request.out, shard, self._dtype)

    def _begin(self, split: str, most: int) -> ShardWriter:
        """A new shard of this split, for no more than `most` tokens."""
        self._split, self._room = split, min(self._request.shard_tokens, most)
        number = sum(shard.split == split for shard in self._progress.shards)
        self._writer = ShardWriter(self._request.out / shard_name(split, number), self._dtype)
        return self._writer

    def _put(self, writer: ShardWriter, ids: Ids) -> int:
        """Write as many of these ids as there is room for; their number."""
        count = min(self._room, len(ids))
        writer.write(ids[:count])
        self._room -= count
        return count

    def _finish(self) -> None:
        """Give the shard its name, and note that."""
        if self._writer is not None:
            self._progress.shards.append(self._writer.finish(self._split))
            self._writer = None
            self._progress.save(self._request.out)

    def _discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None


def _in_pieces(starts: Array, lengths: Array, lead: Array) -> tuple[Array, Array, Array]:
    """The same ids, but long documents are several spans, of which the first alone has a separator."""
    pieces = np.maximum(-(-lengths // AT_ONCE), 1)
    if pieces.max() == 1:
        return starts, lengths, lead
    number = np.concatenate([np.arange(count) for count in pieces.tolist()])
    starts, lengths, lead = (np.repeat(array, pieces) for array in (starts, lengths, lead))
    done = number * AT_ONCE
    return starts + done, np.minimum(lengths - done, AT_ONCE), np.where(number, 0, lead)

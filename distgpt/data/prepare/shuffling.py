"""Shards in a shuffled order of documents, with validation drawn over all of them.

First all documents are tokenized into a spool (spool.py), then taken out of it in the order of their keys. So
the shuffle is one of all documents, in bounded memory, and everything can be counted before the first shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from operator import itemgetter

import numpy as np

from distgpt.data.prepare.encoding import Counts, Encoded
from distgpt.data.prepare.spool import Spool, SpoolReader, files_for
from distgpt.data.prepare.writing import Preparation
from distgpt.data.tokenizers.naming import Ids
from distgpt.kernels.api import Array
from distgpt.units import count

EVERY, EACH = 1 << 24, 1 << 18  # tokens from one note of the progress to the next; more for each file
PARTS = 16  # of validation: a longer document gives a share of its own tokens
LEAST_SHARE = 64  # tokens that make sense on their own

AT_ONCE = 1 << 20  # ids that are read together, or a few more

# File of the spool; of each document in it the first id, their number, and whether the document begins there.
_Spans = tuple[int, Array, Array, Array]


class Shuffled(Preparation):
    """Tokenizes everything, then writes it in another order."""

    def run(self) -> None:
        progress, seed = self._progress, self._request.seed or 0
        if progress.complete:
            self._check_finished()
            return
        sizes = progress.spooled or [[0, 0] for _ in range(files_for(self._total))]
        self._spool = Spool(self._request.out, self._dtype, seed, sizes)
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
        with self._encoded(()) as results:
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
        self._watcher.began(self._with_separators() * width, documents, "shuffling")
        self._done = 0
        try:
            self._write("val", progress.held_out or 0)
            self._write("train", 2 * self._with_separators())  # all there is
        finally:
            self._discard()

    def _write(self, split: str, left: int) -> None:
        """So many ids of a split, or what finished shards do not hold of them."""
        skip = self._progress.tokens(split)
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
        """What belongs to a split, in the shuffled order.

        Long documents give their beginning to validation, as large a share as it is of all; the rest of it is
        made of the first short ones. So many long texts, or few, are all in it, and a single one stays whole.
        """
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


def _in_pieces(starts: Array, lengths: Array, lead: Array) -> tuple[Array, Array, Array]:
    """The same ids, but long documents are several spans, of which the first alone has a separator."""
    pieces = np.maximum(-(-lengths // AT_ONCE), 1)
    if pieces.max() == 1:
        return starts, lengths, lead
    number = np.concatenate([np.arange(count) for count in pieces.tolist()])
    starts, lengths, lead = (np.repeat(array, pieces) for array in (starts, lengths, lead))
    done = number * AT_ONCE
    return starts + done, np.minimum(lengths - done, AT_ONCE), np.where(number, 0, lead)

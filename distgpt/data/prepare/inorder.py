"""Shards in the order in which documents are read, in one pass: their beginning is for validation."""

from __future__ import annotations

from distgpt.data.prepare.documents import Place
from distgpt.data.prepare.encoding import Counts, Encoded
from distgpt.data.prepare.progress import remove_partial
from distgpt.data.prepare.writing import LEAST, Preparation
from distgpt.data.shardfile import ShardWriter
from distgpt.data.tokenizers.naming import Ids


class InOrder(Preparation):
    """Writes the ids of the pieces, as they come in, to shards."""

    def run(self) -> None:
        self._write_all()
        exact = self._request.held_out(self._progress.tokens("train") + self._progress.tokens("val"))
        if self._is_far_from(exact):
            self._watcher.noted("too much was held out for validation: starting again with the right part")
            self._begin_again(exact)
            self._write_all()

    def _write_all(self) -> None:
        """Put everything that is left into shards."""
        progress = self._progress
        self._check_finished()
        tokens = sum(shard.tokens for shard in progress.shards)
        counts, skip = progress.counts, progress.skip
        self._tallies = progress.tallies()
        try:
            with self._encoded(self._separator.ids) as results:
                for encoded in results:
                    ids = self._without_first_separator(encoded, counts)
                    tokens += len(ids) - skip
                    self._write(ids, skip, encoded, counts)
                    counts, skip = counts + encoded.counts, 0
                    self._watcher.advanced(encoded.consumed, tokens)
            self._finish_at(Place(len(self._inputs)), 0, counts)
        finally:
            self._discard()
        progress.counts, progress.sources = counts, self._tallies

    def _without_first_separator(self, encoded: Encoded, before: Counts) -> Ids:
        is_first = not before.documents and encoded.counts.documents
        return encoded.ids[len(self._separator.ids) if is_first and self._separator.only_between else 0 :]

    def _write(self, ids: Ids, start: int, encoded: Encoded, before: Counts) -> None:
        """These ids, from `start` on, to as many shards as it takes."""
        if self._progress.held_out is None and len(ids):
            self._progress.held_out = self._held_out(len(ids), encoded)
        while start < len(ids):
            start += self._put(self._writer or self._next(), ids[start:])
            if not self._room and start < len(ids):
                self._finish_at(encoded.place, start, before)
        encoded.tally(self._tallies)
        if self._writer is not None and not self._room:
            self._finish_at(encoded.next, 0, before + encoded.counts)

    def _held_out(self, tokens: int, first: Encoded) -> int:
        """Tokens for validation, estimated for all inputs from the first piece with any tokens.

        Of inputs stored like its own, the bytes in the files count; of others, which may be compressed or
        not, each byte counts as one of text.
        """
        own = self._inputs[first.place.input]
        alike = sum(
            source.bytes
            for source in self._inputs
            if (source.kind, source.compressed) == (own.kind, own.compressed)
        )
        in_file = tokens / max(1, first.consumed)
        in_text = tokens / max(1, first.counts.text_bytes)
        return self._request.held_out(round(in_file * alike + in_text * (self._total - alike)))

    def _is_far_from(self, exact: int) -> bool:
        """Whether far too much has been held out, or so much that nothing is left for training."""
        train, val = self._progress.tokens("train"), self._progress.tokens("val")
        if self._request.val_shards is not None or val == exact:
            return False
        return val > 2 * exact or train < LEAST

    def _begin_again(self, held_out: int) -> None:
        progress = self._progress
        progress.held_out = held_out
        progress.shards.clear()
        progress.place, progress.skip, progress.counts = Place(), 0, Counts()
        progress.sources = [[0, 0] for _ in self._inputs]
        progress.save(self._request.out)
        remove_partial(self._request.out, progress)

    def _next(self) -> ShardWriter:
        left = (self._progress.held_out or 0) - self._progress.tokens("val")
        return self._begin("val" if left else "train", left or self._request.shard_tokens)

    def _finish_at(self, place: Place, skip: int, counts: Counts) -> None:
        """The next shard begins with the token `skip` of the piece at this place."""
        if self._writer is not None:
            progress = self._progress
            progress.place, progress.skip, progress.counts = place, skip, counts
            progress.sources = [list(pair) for pair in self._tallies]
            self._finish()

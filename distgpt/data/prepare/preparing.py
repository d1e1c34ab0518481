"""From documents to token shards: in order, in bounded memory, and resumable after an interruption."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.data.prepare.documents import Input, Piece, Place, documents, find_inputs, pieces
from distgpt.data.prepare.encoding import Counts, Encoded, Encoder, find_separator, in_order
from distgpt.data.prepare.progress import (
    PROGRESS,
    Progress,
    Settings,
    list_inputs,
    load_progress,
    remove_all,
    remove_partial,
    reserved,
)
from distgpt.data.prepare.vocabulary import learn_entries
from distgpt.data.shards import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardWriter,
    map_shard,
    read_tokenizer,
    shard_name,
)
from distgpt.data.tokenizers.naming import Ids, Tokenizer, fingerprint, id_dtype, load_tokenizer
from distgpt.errors import DataError, DistgptError, UsageError
from distgpt.files import atomic_file, storage_errors
from distgpt.units import count

FROM_INPUTS = ("char", "word")  # tokenizers whose vocabulary comes from the inputs
LEAST = 2  # tokens: one to see, one to predict


@dataclass(frozen=True, slots=True)
class Request:
    """`val_shards`, if given, counts whole shards for validation, instead of a fraction of the tokens."""

    inputs: tuple[Path, ...]
    tokenizer: str
    out: Path
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.05
    val_shards: int | None = None
    separator: str = "auto"
    field: str = "text"
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
        }


class Watcher(Protocol):
    """Shows the progress of the work."""

    def began(self, total_bytes: int, tokenizer: str) -> None: ...

    def advanced(self, consumed: int, tokens: int) -> None: ...

    def noted(self, text: str) -> None: ...


def prepare(request: Request, watcher: Watcher) -> Manifest:
    """Write the shards, or what is missing of them."""
    inputs = find_inputs(request.inputs)
    tokenizer = None if request.tokenizer in FROM_INPUTS else load_tokenizer(request.tokenizer)
    fresh = Progress(request.settings(tokenizer), list_inputs(inputs))
    with reserved(request.out):
        progress = load_progress(request.out, fresh)
        if progress.shards:
            watcher.noted(f"resuming after {_finished(progress)} in {request.out}")
        remove_partial(request.out, progress.shards)
        try:
            progress.save(request.out)
            if tokenizer is None and progress.shards:
                tokenizer = read_tokenizer(request.out)
            elif tokenizer is None:
                watcher.noted(f"collecting the {request.tokenizer} vocabulary")
                tokenizer = learn_entries(request.tokenizer, documents(request.inputs, request.field))
            with atomic_file(request.out / TOKENIZER) as file:
                file.write(tokenizer.to_json().encode())
            return _Preparation(request, inputs, tokenizer, progress, watcher).run()
        except DataError:
            if progress.shards:
                watcher.noted(f"{_finished(progress)} in {request.out}: remove it once an input has changed")
            raise
        except (KeyboardInterrupt, DistgptError):
            if progress.shards:
                watcher.noted(f"{_finished(progress)} in {request.out}: the same command resumes")
            raise
        finally:
            if progress.shards:
                remove_partial(request.out, progress.shards)
            else:
                remove_all(request.out)


def _finished(progress: Progress) -> str:
    return count(len(progress.shards), "finished shard")


class _Preparation:
    """Writes the ids of the pieces, as they come in, to shards."""

    def __init__(
        self,
        request: Request,
        inputs: list[Input],
        tokenizer: Tokenizer,
        progress: Progress,
        watcher: Watcher,
    ) -> None:
        self._request, self._inputs, self._tokenizer = request, inputs, tokenizer
        self._progress, self._watcher = progress, watcher
        self._separator = find_separator(request.separator, tokenizer)
        self._dtype = np.dtype(id_dtype(tokenizer.size)).newbyteorder("<").str
        self._total = sum(source.bytes for source in inputs)
        self._writer: ShardWriter | None = None
        self._split, self._room = "", 0  # of the shard being written

    def run(self) -> Manifest:
        counts = self._tokenized()
        exact = self._fraction_of(self._progress.tokens("train") + self._progress.tokens("val"))
        if self._is_far_from(exact):
            self._watcher.noted("too much was held out for validation: starting again with the right part")
            self._begin_again(exact)
            counts = self._tokenized()
        return self._sealed(counts)

    def _tokenized(self) -> Counts:
        """Put everything that is left into shards; counts what is in all of them."""
        request, progress = self._request, self._progress
        self._watcher.began(self._total, self._tokenizer.describe())
        todo = pieces(self._inputs, request.field, progress.place)
        encoder = Encoder(self._tokenizer, self._separator.ids, request.field)
        for shard in progress.shards:
            map_shard(request.out, shard, self._dtype)
        tokens = sum(shard.tokens for shard in progress.shards)
        counts, skip = progress.counts, progress.skip
        try:
            with closing(in_order(encoder, todo, Piece.size, request.workers)) as results:
                for encoded in results:
                    ids = self._without_first_separator(encoded, counts)
                    tokens += len(ids) - skip
                    self._write(ids, skip, encoded, counts)
                    counts, skip = counts + encoded.counts, 0
                    self._watcher.advanced(encoded.consumed, tokens)
            self._finish(Place(len(self._inputs)), 0, counts)
        finally:
            if self._writer is not None:
                self._writer.discard()
                self._writer = None
        return counts

    def _without_first_separator(self, encoded: Encoded, before: Counts) -> Ids:
        is_first = not before.documents and encoded.counts.documents
        return encoded.ids[len(self._separator.ids) if is_first and self._separator.only_between else 0 :]

    def _write(self, ids: Ids, start: int, encoded: Encoded, before: Counts) -> None:
        """These ids, from `start` on, to as many shards as it takes."""
        if self._progress.held_out is None and len(ids):
            self._progress.held_out = self._held_out(len(ids), encoded)
        while start < len(ids):
            writer = self._writer or self._begin()
            stop = min(start + self._room, len(ids))
            writer.write(ids[start:stop])
            self._room -= stop - start
            start = stop
            if not self._room and stop < len(ids):
                self._finish(encoded.place, stop, before)
            elif not self._room:
                self._finish(encoded.next, 0, before + encoded.counts)

    def _held_out(self, tokens: int, first: Encoded) -> int:
        """Tokens for validation, estimated for all inputs from the first piece with any tokens.

        Of inputs stored like its own, the bytes in the files count; of others, which may be compressed or
        not, each byte counts as one of text.
        """
        request = self._request
        if request.val_shards is not None:
            return request.val_shards * request.shard_tokens
        own = self._inputs[first.place.input]
        alike = sum(
            source.bytes
            for source in self._inputs
            if (source.kind, source.compressed) == (own.kind, own.compressed)
        )
        in_file = tokens / max(1, first.consumed)
        in_text = tokens / max(1, first.counts.text_bytes)
        return self._fraction_of(round(in_file * alike + in_text * (self._total - alike)))

    def _fraction_of(self, tokens: int) -> int:
        held_out = min(int(self._request.val_fraction * tokens), self._request.shard_tokens)
        return held_out if held_out >= LEAST else 0

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
        progress.save(self._request.out)
        remove_partial(self._request.out, ())

    def _begin(self) -> ShardWriter:
        progress = self._progress
        left = (progress.held_out or 0) - progress.tokens("val")
        self._split = "val" if left else "train"
        self._room = min(self._request.shard_tokens, left or self._request.shard_tokens)
        number = sum(shard.split == self._split for shard in progress.shards)
        self._writer = ShardWriter(self._request.out / shard_name(self._split, number), self._dtype)
        return self._writer

    def _finish(self, place: Place, skip: int, counts: Counts) -> None:
        """The next shard begins with the token `skip` of the piece at this place."""
        if self._writer is None:
            return
        progress = self._progress
        progress.shards.append(self._writer.finish(self._split))
        progress.place, progress.skip, progress.counts = place, skip, counts
        self._writer = None
        progress.save(self._request.out)

    def _sealed(self, counts: Counts) -> Manifest:
        request, progress = self._request, self._progress
        self._refuse_without_training()
        if list_inputs(find_inputs(request.inputs)) != progress.inputs:
            raise DataError(f"the inputs changed while they were read; remove {request.out} and begin again")
        manifest = Manifest(
            tokenizer=fingerprint(self._tokenizer),
            description=self._tokenizer.describe(),
            vocab_size=self._tokenizer.size,
            dtype=self._dtype,
            shards=tuple(progress.shards),
            separator=self._separator.ids,
            settings={name: progress.settings[name] for name in progress.settings if name != "tokenizer"},
            inputs=tuple((source.name, source.bytes) for source in self._inputs),
            documents=counts.documents,
            text_bytes=counts.text_bytes,
            replaced=counts.replaced,
        )
        with atomic_file(request.out / MANIFEST) as file:
            file.write(manifest.to_json().encode())
        with storage_errors("write to", request.out):
            (request.out / PROGRESS).unlink()
        return manifest

    def _refuse_without_training(self) -> None:
        progress = self._progress
        train, val = progress.tokens("train"), progress.tokens("val")
        if train >= LEAST:
            return
        progress.shards.clear()
        if train + val == 1:
            raise DataError("there is only 1 token; at least 2 are needed, one to see and one to predict")
        if not train + val:
            raise DataError(f"there is no text in {', '.join(map(str, self._request.inputs)):.200}")
        raise DataError(
            f"nothing is left for training: of {train + val:,} tokens, {val:,} are for validation;"
            " lower --val-shards or --val-fraction, or --shard-tokens"
        )

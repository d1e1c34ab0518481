"""From documents to token shards: in bounded memory, on several threads, resumable after an interruption.

First all documents are tokenized into a spool (spool.py), then taken out of it in the order of their keys. So
the shuffle is one of all documents, and everything is counted before the first shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.core.base.errors import DataError, DistgptError, UsageError, escape
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.data.textfile import CONVERT
from distgpt.core.data.tokenizers import (
    Ids,
    Tokenizer,
    find_kind,
    fingerprint,
    id_dtype,
    load_tokenizer,
)
from distgpt.core.ops.api import Array
from distgpt.corpora.prepare.documents import (
    FIELD,
    MAX_DOCUMENT,
    Input,
    Offset,
    Piece,
    documents,
    find_inputs,
    pieces,
)
from distgpt.corpora.prepare.encoding import Separator, encode, find_separator, in_order
from distgpt.corpora.prepare.progress import (
    PROGRESS,
    Progress,
    Settings,
    list_inputs,
    load_progress,
    remove_all,
    remove_partial,
    reserved,
)
from distgpt.corpora.prepare.spool import Spool
from distgpt.corpora.shards import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardWriter,
    Split,
    check_front,
    read_tokenizer,
    shard_name,
)
from distgpt.corpora.tokenizers.learn import not_empty

LEAST = 2  # tokens: one to see, one to predict
EVERY = 1 << 24  # tokens from one note of the progress to the next
PARTS = 16  # of validation: a longer document gives a share of its own tokens
LEAST_SHARE = 64  # tokens that make sense on their own

DOCUMENTS_AT_ONCE = 1 << 16
AT_ONCE = 1 << 20  # ids that are read together, or a few more


@dataclass(frozen=True, slots=True)
class Request:
    """`tokenizer` is one, or its name; for char, word and bpe:N it is made from the inputs.

    `val_shards`, if given, counts whole shards for validation, instead of a fraction of the tokens.
    Without a `seed` the documents stay in the order in which they are read.
    """

    inputs: tuple[Path | Input, ...]
    tokenizer: str | Tokenizer
    out: Path
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.05
    val_shards: int | None = None
    separator: str = "auto"
    field: str = FIELD
    seed: int | None = 0
    max_document: int = MAX_DOCUMENT
    workers: int = 1

    def __post_init__(self) -> None:
        if self.shard_tokens < LEAST:
            raise UsageError(f"--shard-tokens is {self.shard_tokens}: it must be at least {LEAST}")
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"--val-fraction is {self.val_fraction}: it must lie in [0, 1)")

    def known_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, unless it has to be made from the inputs."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        kind, _ = find_kind(self.tokenizer)
        return None if kind and kind.learn else load_tokenizer(self.tokenizer)

    def made_tokenizer(self) -> Tokenizer:
        """Return the tokenizer made from the inputs."""
        kind, argument = find_kind(str(self.tokenizer))
        assert kind is not None and kind.learn is not None
        texts = documents(self.inputs, self.field, self.max_document)
        return kind.learn(argument, not_empty(texts), True)

    def settings(self, tokenizer: Tokenizer | None) -> Settings:
        """Return what the shards depend on, besides the inputs."""
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
        """Return the number of tokens for validation among this many."""
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

    def run(self) -> None:
        """Write all shards, or those that are missing. `progress` then describes all of them."""
        request, progress = self._request, self._progress
        for shard in progress.shards:
            check_front(request.out / shard.name, shard, self._dtype)
        if progress.complete:
            return
        with closing(Spool(request.out, self._dtype, progress.spooled)) as self._spool:
            if progress.held_out is None:
                self._fill_spool()
            self._write_all()
        progress.complete = True
        progress.spooled = [0, 0]
        progress.save(request.out)

    def _fill_spool(self) -> None:
        request, progress, spool = self._request, self._progress, self._spool
        every = min(request.shard_tokens, EVERY)
        tokens = noted = progress.spooled[0]
        self._watcher.began(sum(source.bytes for source in self._inputs), self._tokenizer.describe())
        broken: Counter[str] = Counter()  # characters that were not UTF-8, by file
        todo = pieces(self._inputs, request.field, progress.place, request.max_document)
        work = partial(encode, tokenizer=self._tokenizer, field=request.field)
        with closing(in_order(work, todo, Piece.size, request.workers)) as results:
            for encoded in results:
                piece, source = encoded.piece, progress.sources[encoded.piece.place.input]
                if encoded.counts.replaced:
                    broken[piece.source] += encoded.counts.replaced
                spool.add(encoded.ids, encoded.lengths, piece.begins)
                progress.counts += encoded.counts
                source[0] += encoded.counts.documents
                source[1] += len(encoded.ids)
                tokens += len(encoded.ids)
                if tokens - noted >= every:
                    progress.place, progress.spooled = piece.next, spool.flush()
                    progress.save(request.out)
                    noted = tokens
                self._watcher.advanced(piece.consumed, tokens)
        for name, times in broken.most_common(1):
            others = f" (and {count(len(broken) - 1, 'other file')})" if len(broken) > 1 else ""
            invalid = f"{count(times, 'invalid character')} in {escape(name)}{others}"
            self._watcher.noted(f"{invalid}: {CONVERT}")
        progress.spooled = spool.flush()
        tokens = max(0, self._with_separators() - self._dropped())
        progress.held_out = min(request.held_out(tokens), tokens)
        progress.save(request.out)

    def _with_separators(self) -> int:
        """Return the number of ids of all documents, with a separator next to each."""
        return self._progress.spooled[0] + len(self._separator.ids) * self._progress.counts.documents

    def _dropped(self) -> int:
        """Return the number of ids of a separator that does not stand before the first document."""
        return len(self._separator.ids) * self._separator.only_between

    def _write_all(self) -> None:
        documents = count(self._progress.counts.documents, "document")
        label = "writing" if self._request.seed is None else "shuffling"
        total = self._with_separators()
        self._watcher.began(total * np.dtype(self._dtype).itemsize, documents, label)
        self._index = self._spool.index(self._request.seed)
        self._done = 0
        self._write("val", self._progress.held_out or 0)
        self._write("train", 2 * total)  # all that remains

    def _write(self, split: Split, left: int) -> None:
        """Write this many ids of a split, or what finished shards do not hold of them."""
        request, progress = self._request, self._progress
        skip = progress.tokens(split)
        if split == "train" and request.seed is None:  # its stream begins with those for validation
            skip += progress.held_out or 0
        width, total = np.dtype(self._dtype).itemsize, self._with_separators()
        writer: ShardWriter | None = None
        try:
            for ids in self._stream(split) if left else ():
                ids = ids[:left]
                left -= len(ids)
                self._done += len(ids)
                skip, ids = max(0, skip - len(ids)), ids[skip:]
                while len(ids):
                    if writer is None:
                        number = sum(shard.split == split for shard in progress.shards)
                        writer = ShardWriter(request.out / shard_name(split, number), self._dtype)
                    room = min(len(ids), request.shard_tokens - writer.tokens)
                    writer.write(ids[:room])
                    ids = ids[room:]
                    if writer.tokens == request.shard_tokens:
                        self._finish(writer, split)
                        writer = None
                    self._watcher.advanced(min(self._done, total) * width, self._done)
                if not left:
                    break
            if writer:
                self._finish(writer, split)
        except BaseException:
            if writer:
                writer.discard()
            raise

    def _finish(self, writer: ShardWriter, split: Split) -> None:
        """Give the shard its name, and note that."""
        self._progress.shards.append(writer.finish(split))
        self._progress.save(self._request.out)

    def _stream(self, split: Split) -> Iterator[Ids]:
        """Yield a split's ids, about `AT_ONCE` at a time.

        A separator stands before each document, and before the rest of one that was cut.
        """
        is_first = True
        for starts, lengths, is_whole in self._spans(split):
            lead = np.full(len(starts), len(self._separator.ids))
            if is_first and (self._separator.only_between or not is_whole[0]):
                lead[0] = 0
            is_first = False
            starts, lengths, lead = _in_pieces(starts, lengths, lead)
            ends = np.cumsum(lead + lengths)
            cuts = np.flatnonzero(np.diff(ends // AT_ONCE)) + 1
            for first, stop in pairwise([0, *cuts.tolist(), len(ends)]):
                some, begin = slice(first, stop), ends[first] - lengths[first] - lead[first]
                at = (ends - lengths)[some] - begin
                ids = np.empty(ends[stop - 1] - begin, self._dtype)
                for back, token in enumerate(reversed(self._separator.ids), 1):
                    ids[at[lead[some] > 0] - back] = token
                self._spool.read_ids(ids, at.tolist(), starts[some].tolist(), lengths[some].tolist())
                yield ids

    def _spans(self, split: Split) -> Iterator[tuple[Array, Array, Array]]:
        """Yield the parts of documents that belong to a split, in their order, some at a time.

        Of each part the first id, the number of ids, and whether the document begins there. Without a shuffle
        they are all documents, of which the first ids are for validation. Else validation takes the same
        share from the start of every long document, and fills up with short ones. So every long document
        contributes, and each is cut at most once.
        """
        starts, lengths, order = self._index
        between, total = len(self._separator.ids), max(1, self._with_separators())
        held_out = self._progress.held_out or 0
        least = total + 1  # ids of a document that gives some to validation, with its separator
        if held_out:
            held_out += self._dropped()
            share = (LEAST_SHARE + between) * total
            least = max(held_out // PARTS + 1, -(-share // held_out))
        of_long = int((lengths + between)[lengths + between >= least].sum())
        long_so_far, left = 0, held_out - held_out * of_long // total
        for some in (order[i : i + DOCUMENTS_AT_ONCE] for i in range(0, len(order), DOCUMENTS_AT_ONCE)):
            first, length = starts[some], lengths[some]
            if self._request.seed is None:
                yield first, length, np.ones(len(some), bool)
                continue
            tokens = length + between
            short = np.where(tokens < least, tokens, 0)
            given = np.clip(left - np.cumsum(short) + short, 0, short)
            left -= int(given.sum())
            for i in np.flatnonzero(tokens >= least).tolist():  # not in 64 bits
                before, long_so_far = long_so_far, long_so_far + int(tokens[i])
                given[i] = held_out * long_so_far // total - held_out * before // total
            cut = np.maximum(given - between, 0)
            if split == "val" and len(taken := np.flatnonzero(given)):
                yield first[taken], cut[taken], np.ones(len(taken), bool)
            elif split == "train" and len(taken := np.flatnonzero(given < tokens)):
                yield (first + cut)[taken], (length - cut)[taken], (cut == 0)[taken]


def _in_pieces(starts: Array, lengths: Array, lead: Array) -> tuple[Array, Array, Array]:
    """Split long documents into several spans, of which only the first has a separator."""
    pieces = np.maximum(-(-lengths // AT_ONCE), 1)
    if pieces.max() == 1:
        return starts, lengths, lead
    number = np.concatenate([np.arange(count) for count in pieces.tolist()])
    starts, lengths, lead = (np.repeat(array, pieces) for array in (starts, lengths, lead))
    done = number * AT_ONCE
    return starts + done, np.minimum(lengths - done, AT_ONCE), np.where(number, 0, lead)


def prepare(request: Request, watcher: Watcher, inputs: list[Input] | None = None) -> Manifest:
    """Write the shards, or what is missing of them. `inputs` are those of the request, if already found."""
    inputs = inputs or find_inputs(request.inputs)
    tokenizer = request.known_tokenizer()
    fresh = Progress(request.settings(tokenizer), list_inputs(inputs), sources=[[0, 0] for _ in inputs])
    with reserved(request.out, watcher.noted):
        progress = load_progress(request.out, fresh)
        if progress.begun:
            watcher.noted(f"resuming after {progress.finished()} in {request.out}")
        remove_partial(request.out, progress)
        try:
            progress.save(request.out)
            if tokenizer is None and progress.begun:
                tokenizer = read_tokenizer(request.out)
            elif tokenizer is None:
                watcher.noted(f"collecting the {request.tokenizer} vocabulary")
                tokenizer = request.made_tokenizer()
            with atomic_file(request.out / TOKENIZER) as file:
                file.write(tokenizer.to_json().encode())
            separator = find_separator(request.separator, tokenizer)
            Preparation(request, inputs, tokenizer, progress, separator, watcher).run()
            return _sealed(request, progress, tokenizer, separator.ids)
        except DataError:
            if progress.begun:
                watcher.noted(f"{progress.finished()} in {request.out}: remove it once an input has changed")
            raise
        except (KeyboardInterrupt, DistgptError):
            if progress.begun:
                watcher.noted(f"{progress.finished()} in {request.out}: the same command resumes")
            raise
        finally:
            if progress.begun:
                remove_partial(request.out, progress)
            else:
                remove_all(request.out)


def _sealed(
    request: Request, progress: Progress, tokenizer: Tokenizer, separator: tuple[int, ...]
) -> Manifest:
    """Write the manifest, with which the shards are complete."""
    _refuse_without_training(request, progress)
    if list_inputs(find_inputs(request.inputs)) != progress.inputs:
        raise DataError(f"the inputs changed while they were read; remove {request.out} and begin again")
    manifest = Manifest(
        tokenizer=fingerprint(tokenizer),
        description=tokenizer.describe(),
        vocab_size=tokenizer.size,
        dtype=np.dtype(id_dtype(tokenizer.size)).newbyteorder("<").str,
        shards=tuple(progress.shards),
        separator=separator,
        settings={name: progress.settings[name] for name in progress.settings if name != "tokenizer"},
        inputs=tuple((name, size) for name, size, _ in progress.inputs),
        sources=tuple((documents, tokens) for documents, tokens in progress.sources),
        documents=progress.counts.documents,
        text_bytes=progress.counts.text_bytes,
        replaced=progress.counts.replaced,
    )
    with atomic_file(request.out / MANIFEST) as file:
        file.write(manifest.to_json().encode())
    with storage_errors("write to", request.out):
        (request.out / PROGRESS).unlink()
    return manifest


def _refuse_without_training(request: Request, progress: Progress) -> None:
    train, val = progress.tokens("train"), progress.tokens("val")
    if train >= LEAST:
        return
    progress.shards.clear()  # nothing to resume
    progress.place = Offset()
    if train + val == 1:
        raise DataError("there is only 1 token; at least 2 are needed, one to see and one to predict")
    if not train + val:
        names = (given.name if isinstance(given, Input) else str(given) for given in request.inputs)
        raise DataError(f"there is no text in {', '.join(names):.200}")
    raise DataError(
        f"nothing is left for training: of {train + val:,} tokens, {val:,} are for validation;"
        " lower --val-shards or --val-fraction, or --shard-tokens"
    )

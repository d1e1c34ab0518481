"""From documents to token shards, in bounded memory, on multiple threads, resumable.

First, all documents are tokenized into a spool: a file of ids and a file of lengths. Then they are written to
shards in shuffled order. So the shuffle covers all documents, and the number of tokens is known before the
first shard. The index of the documents takes 24 bytes each in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import numpy as np

from distgpt.core.base.checked import Count, Must, checked, parse_json
from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.base.files import atomic_file, locked, read_small, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.data.batches import seeded_hashes
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
    parts,
    pieces,
)
from distgpt.corpora.shards import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    is_shards,
    read_at,
    read_tokenizer,
    write_shard,
)
from distgpt.corpora.tokenizers.bpe import not_empty

T = TypeVar("T")
R = TypeVar("R")

LEAST = 2  # tokens (an input and a target)
EVERY = 1 << 24  # tokens between two saves of the progress
VAL_PARTS = 16  # A document longer than 1/VAL_PARTS of validation contributes part of its tokens.
LEAST_SHARE = 64  # minimum tokens of a share
DOCUMENTS_AT_ONCE = 1 << 16
AT_ONCE = 1 << 20  # ids in memory while reading the spool
AHEAD = 3  # items per worker in flight
LARGEST_QUEUE = 1 << 26  # bytes in flight; beyond it, no more items are read

PROGRESS, SPOOL = "progress.json", ("spool.ids", "spool.lengths")
# Increase VERSION if the same inputs are cut or tokenized differently, because the rest would not match.
FORMAT, VERSION = "distgpt-unfinished-shards", 5
_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.npy")
_Pair = Annotated[list[Count], Must("be two counts", lambda pair: len(pair) == 2)]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for shards. `tokenizer` is one or its name; char, word and bpe:N are built from the inputs.

    `val_shards`: number of validation shards, instead of a fraction of the tokens. Without a `seed`,
    documents keep their order.
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
            raise UsageError(f"--shard-tokens must be at least {LEAST}, not {self.shard_tokens}")
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"--val-fraction must be at least 0 and less than 1, not {self.val_fraction}")

    def known_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None if it must be built from the inputs."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        kind, _ = find_kind(self.tokenizer)
        return None if kind and kind.learn else load_tokenizer(self.tokenizer)

    def settings(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return everything except the inputs that the shards depend on."""
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
        """Return the number of validation tokens."""
        if self.val_shards is not None:
            return min(tokens, self.val_shards * self.shard_tokens)
        held_out = min(int(self.val_fraction * tokens), self.shard_tokens)
        return held_out if held_out >= LEAST else 0


# -- resuming


@dataclass(slots=True)
class Progress:
    """The state of the spool, which contains all pieces before `place`.

    `sources`: documents and tokens of each input. `spooled`: valid elements of the two files.
    """

    settings: dict[str, Any]
    inputs: list[Annotated[list[Any], Must("have three entries", lambda entry: len(entry) == 3)]]
    place: Offset = field(default_factory=Offset)
    sources: list[_Pair] = field(default_factory=list)
    text_bytes: Count = 0
    replaced: Count = 0
    spooled: _Pair = field(default_factory=lambda: [0, 0])

    @property
    def begun(self) -> bool:
        """Whether there is anything to resume."""
        return self.place != Offset()

    @property
    def documents(self) -> int:
        return sum(documents for documents, _ in self.sources)

    def save(self, folder: Path) -> None:
        contents = {"format": FORMAT, "version": VERSION, "sha256": _sha256(asdict(self)), **asdict(self)}
        with atomic_file(folder / PROGRESS) as file:
            file.write(json.dumps(contents, indent=1).encode())


def list_inputs(inputs: Sequence[Input]) -> list[list[Any]]:
    return [[source.name, source.bytes, source.mtime_ns] for source in inputs]


class BeingPrepared(UsageError):
    """Raised if another process is preparing these shards."""


@contextmanager
def reserved(folder: Path, say: Say) -> Iterator[None]:
    """Create the directory if needed and lock it for this process. Remove a new one that stays empty."""
    with storage_errors("write to", folder):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not locked(descriptor, folder, say):
            is_new = False  # it belongs to the other process
            raise BeingPrepared(f"another process is preparing shards in {folder}")
        yield
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        os.close(descriptor)


def load_progress(folder: Path, fresh: Progress) -> Progress:
    """Return the progress of an earlier process, or `fresh`. Raises a UsageError if its settings differ."""
    if is_shards(folder):
        raise UsageError(f"{folder} already contains shards; choose another --out, or remove it")
    path = folder / PROGRESS
    with storage_errors("read", folder):
        others = [other.name for other in folder.iterdir() if not _is_partial(other.name)]
    if not path.exists():  # accept only files that a killed process left incomplete
        if others:
            raise UsageError(f"{folder} is not empty (it contains {min(others)!r}); choose a new directory")
        return fresh
    if (result := _unfinished(folder)) is None:
        raise UsageError(f"{path} is not from distgpt data prepare; choose a new directory for the shards")
    try:  # check types also, because a hash can be forged
        if result.pop("version", None) != VERSION:
            raise ValueError("written by another version of distgpt")
        if result.pop("sha256", None) != _sha256(result):
            raise ValueError("wrong SHA-256")
        earlier: Progress = checked(Progress, result)
        if earlier.begun and len(earlier.sources) != len(earlier.inputs):
            raise ValueError("its sources must be two counts per input")
    except ValueError as error:
        raise DataError(f"cannot resume {path} ({error}); remove {folder} and start again") from None
    if not earlier.begun:
        return fresh
    before, now = ({**each.settings, "inputs": each.inputs} for each in (earlier, fresh))
    if different := [name for name in now if now[name] != before.get(name)]:
        raise UsageError(
            f"{folder} contains unfinished shards of another command ({', '.join(different)} changed);"
            f" repeat that command, or remove {folder}"
        )
    return earlier


def _unfinished(folder: Path) -> dict[str, Any] | None:
    """Return the progress in a directory, or None if it has no unfinished shards."""
    try:
        result = parse_json(read_small(folder / PROGRESS)) if (folder / PROGRESS).exists() else None
    except (ValueError, DataError):
        return None
    return result if isinstance(result, dict) and result.pop("format", None) == FORMAT else None


def refuse_unfinished(folder: Path) -> None:
    with storage_errors("read", folder):
        unfinished = folder.is_dir() and _unfinished(folder) is not None
    if unfinished:
        raise DataError(f"the shards in {folder} are unfinished; resume with the same distgpt data prepare")


def _sha256(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _is_partial(name: str) -> bool:
    own = (PROGRESS, TOKENIZER, MANIFEST, "train-", "val-")
    return name.endswith(".tmp") and name.startswith(tuple(f".{start}" for start in own))


def _clean(folder: Path, resumable: bool) -> None:
    """Remove shards and incomplete files. If nothing is resumable, remove our other files also."""
    with storage_errors("write to", folder):
        for path in folder.iterdir():
            rest = not resumable and path.name in (*SPOOL, TOKENIZER, PROGRESS)
            if rest or _SHARD.fullmatch(path.name) or _is_partial(path.name):
                path.unlink()


# -- from pieces to ids


def in_order(
    work: Callable[[T], R], items: Iterable[T], bytes_of: Callable[[T], int], workers: int
) -> Generator[R, None, None]:
    """Yield `work(item)` for each item, in order.

    Threads are enough, because the slow work (BPE, decompression, hashing) releases the GIL.
    """
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


def encode(piece: Piece, tokenizer: Tokenizer, field: str) -> tuple[Piece, Ids, list[int], int, int]:
    """Return the piece, its ids, ids per document, bytes of text, and characters replaced.

    Threads may share the tokenizer.
    """
    result = list(parts(piece, field))
    try:
        ids = [tokenizer.encode(text) for text, _ in result]
    except DataError as error:
        raise DataError(f"{piece.source}: {error}") from None
    together = np.concatenate([np.empty(0, id_dtype(tokenizer.size)), *ids])
    text_bytes = sum(len(text.encode()) for text, _ in result)
    return piece, together, list(map(len, ids)), text_bytes, sum(broken for _, broken in result)


def separator_ids(choice: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that separate documents.

    auto: the tokenizer's separator, also before the first document; without one, a line break if it can be
    encoded.
    """
    if choice == "none":
        return ()
    if choice == "auto" and tokenizer.separator is not None:
        return (tokenizer.separator,)
    text = "\n" if choice == "auto" else choice.replace("\\n", "\n").replace("\\t", "\t")
    try:
        return tuple(tokenizer.encode(text).tolist())
    except DataError as error:
        if choice == "auto":
            return ()
        raise UsageError(f"--separator {choice!r}: {error}") from None


# -- the work


class Preparation:
    """Writes ids to the spool, saving progress, and then from the spool to shards."""

    def __init__(
        self,
        request: Request,
        inputs: list[Input],
        tokenizer: Tokenizer,
        progress: Progress,
        watcher: Any,
    ) -> None:
        self._request, self._inputs, self._tokenizer = request, inputs, tokenizer
        self._progress, self._watcher = progress, watcher
        self._separator = separator_ids(request.separator, tokenizer)
        self._only_between = request.separator != "auto" or tokenizer.separator is None
        self._dtype = np.dtype(id_dtype(tokenizer.size)).newbyteorder("<")
        self._paths = [request.out / name for name in SPOOL]

    def run(self) -> Manifest:
        """Write all shards, then the manifest, which marks them complete."""
        with self._opened(0) as self._ids, self._opened(1) as self._lengths:
            if self._progress.place.input < len(self._inputs):
                self._fill_spool()
            between, progress = len(self._separator), self._progress
            # Each document counts with a separator. The first one is dropped if separators only go between
            # documents.
            self._total = progress.spooled[0] + between * progress.documents
            self._dropped = between * self._only_between
            tokens = max(0, self._total - self._dropped)
            self._held_out = self._request.held_out(tokens)
            if tokens - self._held_out < LEAST:
                raise self._nothing_left(tokens)
            self._index()
            label = "writing" if self._request.seed is None else "shuffling"
            what = count(progress.documents, "document")
            self._watcher.began(self._total * self._dtype.itemsize, what, label)
            return self._sealed([*self._written("val"), *self._written("train")])

    @contextmanager
    def _opened(self, which: int) -> Iterator[BinaryIO]:
        """Open a file of the spool, and cut off bytes that a killed process wrote after the last save."""
        path = self._paths[which]
        valid = self._progress.spooled[which] * (self._dtype.itemsize, 8)[which]
        with storage_errors("write", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(path, flags, 0o666), "ab")
            if os.fstat(file.fileno()).st_size < valid:
                raise DataError(f"{path} has lost data; remove {path.parent} and start again")
            file.truncate(valid)
        try:
            yield file
        finally:
            with suppress(OSError):  # data that could not be written
                file.close()

    def _fill_spool(self) -> None:
        request, progress = self._request, self._progress
        tokens = noted = progress.spooled[0]
        self._watcher.began(sum(source.bytes for source in self._inputs), self._tokenizer.describe())
        todo = pieces(self._inputs, request.field, progress.place, request.max_document)
        work = partial(encode, tokenizer=self._tokenizer, field=request.field)
        with closing(in_order(work, todo, Piece.size, request.workers)) as results:
            for piece, ids, lengths, text_bytes, replaced in results:
                if replaced and not progress.replaced:
                    name = escape(piece.source)
                    self._watcher.noted(f"{name} contains invalid UTF-8; {CONVERT}")
                signed = np.array(lengths, "<i8")
                if not piece.begins:  # the first document continues an earlier one
                    signed[:1] = ~signed[:1]
                self._spool(0, ids.astype(self._dtype, copy=False))
                self._spool(1, signed)
                tokens += len(ids)
                source = progress.sources[piece.place.input]
                source[0] += len(lengths) * piece.begins
                source[1] += len(ids)
                progress.text_bytes += text_bytes
                progress.replaced += replaced
                progress.place = piece.next
                if tokens - noted >= min(request.shard_tokens, EVERY):
                    self._note_progress()
                    noted = tokens
                self._watcher.advanced(piece.consumed, tokens)
        progress.place = Offset(len(self._inputs))
        self._note_progress()

    def _spool(self, which: int, array: Array) -> None:
        with storage_errors("write", self._paths[which]):
            (self._ids, self._lengths)[which].write(array.data)
        self._progress.spooled[which] += array.size

    def _note_progress(self) -> None:
        for path, file in zip(self._paths, (self._ids, self._lengths), strict=True):
            with storage_errors("write", path):
                file.flush()
                os.fsync(file.fileno())
        self._progress.save(self._request.out)  # also syncs the directory

    def _nothing_left(self, tokens: int) -> DataError:
        self._progress.place = Offset()  # nothing to resume
        self._progress.save(self._request.out)
        if not tokens:
            given = self._request.inputs
            names = (each.name if isinstance(each, Input) else str(each) for each in given)
            return DataError(f"no text in {', '.join(names):.200}")
        return DataError(
            f"too few tokens for training: {self._held_out:,} of {count(tokens, 'token')} are for"
            " validation; lower --val-shards, --val-fraction or --shard-tokens"
        )

    # -- from the spool to shards

    def _index(self) -> None:
        """Load the position and size of each document, and draw their order.

        Each document has a random key from the seed and its number. Without a seed, they keep their order.
        """
        signed = np.empty(self._progress.spooled[1], "<i8")
        self._read(1, signed, 0)
        first = np.flatnonzero(signed >= 0)
        ends = np.append(0, np.cumsum(np.where(signed < 0, ~signed, signed)))
        self._starts = ends[first]
        self._sizes = np.diff(self._starts, append=ends[-1])
        numbers, seed = np.arange(len(first), dtype=np.uint64), self._request.seed
        self._order = numbers if seed is None else np.argsort(seeded_hashes(seed, numbers), kind="stable")

    def _read(self, which: int, out: Array, start: int) -> None:
        with storage_errors("read", path := self._paths[which]):
            descriptor = (self._ids, self._lengths)[which].fileno()
            if not read_at(descriptor, out.view(np.uint8).data, start * out.itemsize):
                raise DataError(f"{path} was truncated")

    def _written(self, split: Split) -> Iterator[Shard]:
        """Write the shards of a split."""
        request, is_train = self._request, split == "train"
        stream, rest = self._stream(split), np.empty(0, self._dtype)

        def take(count: int) -> Iterator[Ids]:
            nonlocal rest
            while count:
                rest = rest if len(rest) else next(stream)
                some, rest = rest[:count], rest[count:]
                count -= len(some)
                yield some

        total = sum(int(sizes.sum() + lead.sum()) for _, sizes, lead in self._spans(split))
        left, done, number = total if is_train else min(total, self._held_out), 0, 0
        if is_train:
            done = self._held_out
            if request.seed is None:  # its stream starts with the validation tokens
                left -= done
                deque(take(done), maxlen=0)
        while left:
            size = min(left, request.shard_tokens)
            yield write_shard(request.out, split, number, self._dtype.str, size, take(size))
            left, done, number = left - size, done + size, number + 1
            self._watcher.advanced(done * self._dtype.itemsize, done)

    def _stream(self, split: Split) -> Iterator[Ids]:
        """Yield a split's ids, at most `AT_ONCE` at a time, in a reused buffer."""
        separator, out, filled = self._separator, np.empty(AT_ONCE, self._dtype), 0
        for arrays in self._spans(split):
            for start, left, lead in zip(*(array.tolist() for array in arrays), strict=True):
                if filled + lead > AT_ONCE:
                    yield out[:filled]
                    filled = 0
                out[filled : filled + lead] = separator[:lead]
                filled += lead
                while left:
                    if filled == AT_ONCE:
                        yield out
                        filled = 0
                    size = min(left, AT_ONCE - filled)
                    self._read(0, out[filled : filled + size], start)
                    start, left, filled = start + size, left - size, filled + size
        yield out[:filled]

    def _spans(self, split: Split) -> Iterator[tuple[Array, Array, Array]]:
        """Yield the parts of documents that belong to a split, in order, in batches.

        A batch has, for each part, its first id, its number of ids, and the number of preceding separator
        ids. The separator precedes each document and the rest of a cut document. Without a shuffle, batches
        cover all documents, and the first ids are for validation. Otherwise validation takes the same share
        from the start of every long document and is filled with short ones. So every long document
        contributes, and each document is cut at most once.
        """
        between, total, is_first = len(self._separator), max(1, self._total), True
        held_out = self._held_out
        least = total + 1  # minimum size of a long document, with its separator
        if held_out:
            held_out += self._dropped
            share = (LEAST_SHARE + between) * total
            least = max(held_out // VAL_PARTS + 1, -(-share // held_out))
        tokens = self._sizes + between
        of_long = int(tokens[tokens >= least].sum())
        long_so_far, left = 0, held_out - held_out * of_long // total
        for at in range(0, len(self._order), DOCUMENTS_AT_ONCE):
            some = self._order[at : at + DOCUMENTS_AT_ONCE]
            starts, sizes = self._starts[some], self._sizes[some]
            is_whole = np.ones(len(some), bool)
            if self._request.seed is not None:
                tokens = sizes + between
                short = np.where(tokens < least, tokens, 0)
                given = np.clip(left - np.cumsum(short) + short, 0, short)
                left -= int(given.sum())
                for i in np.flatnonzero(tokens >= least).tolist():  # the products may exceed 64 bits
                    before, long_so_far = long_so_far, long_so_far + int(tokens[i])
                    given[i] = held_out * long_so_far // total - held_out * before // total
                cut = np.maximum(given - between, 0)
                if split == "val":
                    taken, sizes = np.flatnonzero(given), cut
                else:
                    taken, starts, sizes = np.flatnonzero(given < tokens), starts + cut, sizes - cut
                    is_whole = cut == 0
                starts, sizes, is_whole = starts[taken], sizes[taken], is_whole[taken]
            lead = np.full(len(starts), between)
            if is_first and len(starts):
                lead[0] *= is_whole[0] and not self._only_between
                is_first = False
            yield starts, sizes, lead

    def _sealed(self, shards: list[Shard]) -> Manifest:
        """Write the manifest, then remove the temporary files."""
        request, progress, tokenizer = self._request, self._progress, self._tokenizer
        if list_inputs(find_inputs(request.inputs)) != progress.inputs:
            raise DataError(f"the inputs changed while being read; remove {request.out} and start again")
        manifest = Manifest(
            tokenizer=fingerprint(tokenizer),
            description=tokenizer.describe(),
            vocab_size=tokenizer.size,
            dtype=self._dtype.str,
            shards=tuple(shards),
            separator=self._separator,
            settings={name: progress.settings[name] for name in progress.settings if name != "tokenizer"},
            inputs=tuple((name, size) for name, size, _ in progress.inputs),
            sources=tuple((documents, tokens) for documents, tokens in progress.sources),
            documents=progress.documents,
            text_bytes=progress.text_bytes,
            replaced=progress.replaced,
        )
        with atomic_file(request.out / MANIFEST) as file:
            file.write(manifest.to_json().encode())
        with storage_errors("write to", request.out):
            for name in (*SPOOL, PROGRESS):
                (request.out / name).unlink()
        return manifest


def prepare(request: Request, watcher: Any, inputs: list[Input] | None = None) -> Manifest:
    """Write the shards. `inputs`: the request's inputs, if already listed.

    `watcher` shows the progress: began(bytes, of, label), advanced(bytes, tokens), noted(text).
    """
    inputs = inputs or find_inputs(request.inputs)
    tokenizer, out = request.known_tokenizer(), request.out
    fresh = Progress(request.settings(tokenizer), list_inputs(inputs), sources=[[0, 0] for _ in inputs])
    with reserved(out, watcher.noted):
        progress = load_progress(out, fresh)
        if progress.begun:
            watcher.noted(f"resuming after {count(progress.spooled[0], 'token')} in {out}")
        _clean(out, progress.begun)
        try:
            progress.save(out)
            if tokenizer is None and progress.begun:
                tokenizer = read_tokenizer(out)
            elif tokenizer is None:
                watcher.noted(f"collecting the {request.tokenizer} vocabulary")
                kind, argument = find_kind(str(request.tokenizer))
                assert kind is not None and kind.learn is not None
                texts = documents(request.inputs, request.field, request.max_document)
                tokenizer = kind.learn(argument, not_empty(texts), True)
            with atomic_file(out / TOKENIZER) as file:
                file.write(tokenizer.to_json().encode())
            return Preparation(request, inputs, tokenizer, progress, watcher).run()
        except BaseException:
            noted = _unfinished(out)
            resumable = noted is not None and noted.get("place") != asdict(Offset())
            if resumable:
                watcher.noted(f"to resume in {out}, repeat the command; if an input has changed, remove it")
            _clean(out, resumable)
            raise

"""Load `--data` and `--val` as tokens on every rank.

Each kind of text is a row of a table. Plain texts and shards stand here, others are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

import numpy as np

from distgpt.core.base.errors import DataError, DistgptError, Say
from distgpt.core.base.files import open_regular
from distgpt.core.base.formatting import count
from distgpt.core.base.tables import Table
from distgpt.core.comm.agree import on_root, refuse_anywhere, shared
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches, Tokens, Window, windows_of
from distgpt.core.data.named import resolve_data
from distgpt.core.data.shards import (
    Manifest,
    ShardTokens,
    is_shards,
    read_manifest,
    shards_tokenizer,
    verify_shards,
)
from distgpt.core.data.tokenizers import (
    Ids,
    Tokenizer,
    build_tokenizer,
    can_mean,
    find_kind,
    fingerprint,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.core.data.unreadable import refuse_by_name, way_out

LONGEST_PROMPT = 64 << 20  # bytes
BYTE = "byte"
AUTO = "auto"  # the tokenizer that shards were made with; of a text, bytes
PLAIN, SHARDS, FOLDER = "plain", "shards", "/"  # rows of TEXTS


@dataclass(frozen=True, slots=True)
class DataRequest:
    """A request to load data. `existing` is the tokenizer of a model that there is already.

    `val_fraction` holds out the first part of a text, or some of several documents; shards have their own.
    """

    data: str
    tokenizer: str = AUTO
    seq_len: int = 1
    val_fraction: float = 0.0
    verify: bool = True  # read the shards before anything else
    splits: tuple[str, ...] = ("train", "val")  # of shards; all that there is if none of these
    existing: Tokenizer | None = None
    val: str = ""  # a held-out text, instead of a part of `data`
    kind: str = ""  # the row of TEXTS, where a setting chooses it; by default the path does
    kept: Path = Path("runs/tokenized")  # the folder of tokenized texts of other kinds


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens by split, and the batches and windows that are cut of them.

    Without a split "val" all of the text is for training.
    """

    tokenizer: Tokenizer
    splits: dict[str, Tokens]
    separator: int | None = None  # the token before each document, if there is one
    is_text: ClassVar[bool] = True  # so that a loss has a unit in bytes

    @property
    def train(self) -> Tokens:
        return self.splits["train"]

    @property
    def val(self) -> Tokens | None:
        return self.splits.get("val")

    @property
    def held_out(self) -> Tokens:
        """Return the tokens for validation: those of a split of their own, or all."""
        return self.splits.get("val") or self.splits["train"]

    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        """Return the batches to train on. Collective."""
        return Batches.of_run(self.train, run)

    def held_out_windows(self, seq_len: int, most: int) -> list[Window]:
        """Cut the first `most` tokens for validation (0: all) into windows to score."""
        return windows_of(self.held_out, seq_len, most)


class TextKind(Protocol):
    """A row of the table of texts."""

    def refuse_missing(self, request: DataRequest) -> None:
        """Raise a DataError where the data cannot be loaded. Reads no text, and fetches no tokenizer."""

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        """Load the same corpus on every rank, without `request.val`. Collective."""


def read_text(path: Path, stream: BinaryIO | None = None) -> str:
    """Return a file's text: strict UTF-8, without a byte order mark, with \\n for line breaks, never empty.

    Where a `stream` is given, it is read instead, up to a length that no prompt has.
    """
    try:
        with nullcontext(stream) if stream else open_regular(path) as file:
            text = file.read(LONGEST_PROMPT if stream else -1).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text, byte {error.start} cannot be decoded"
        found = way_out(None if stream else path, error.object, error.start)
        raise DataError(f"{what}: {found}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise DataError(f"{path} is empty; give a file with some text in it")
    return text


def kind_of(data: str) -> str:
    """Return the row of TEXTS that a file or folder belongs to, by its name and its content."""
    path = resolve_data(data)
    if is_shards(path):
        return SHARDS
    if path.is_dir():
        return FOLDER
    endings = (name for name in TEXTS if name.startswith("."))
    return next((ending for ending in endings if path.name.lower().endswith(ending)), PLAIN)


def refuse_missing(texts: Iterable[str], tokenizer: str, kind: str = "") -> None:
    """Refuse missing files, shards of another tokenizer, and files of a kind that cannot be read.

    Reads no text, and downloads no tokenizer.
    """
    for data in texts:
        TEXTS[kind or kind_of(data)].refuse_missing(DataRequest(data, tokenizer))
    if tokenizer != AUTO and find_kind(tokenizer)[0] is None:
        load_tokenizer(tokenizer)


def load_corpus(comm: Comm, request: DataRequest, say: Say = lambda text: None) -> Corpus:
    """Load the same corpus on every rank. An error on any rank is raised on all of them. Collective."""
    if not request.val:
        return load_one(comm, request, say)
    # Refused now, before the other text is tokenized, which may take hours.
    on_root(comm, lambda: refuse_missing([request.val], AUTO, request.kind))
    corpus = load_one(comm, replace(request, splits=("train",)), say)
    others = replace(request, data=request.val, tokenizer=AUTO, existing=corpus.tokenizer, splits=("val",))
    held_out = load_one(comm, others, say).held_out
    return replace(corpus, splits={"train": corpus.train, "val": held_out})


def load_one(comm: Comm, request: DataRequest, say: Say) -> Corpus:
    """Load `request.data` alone. Collective."""
    kind = request.kind or on_root(comm, lambda: kind_of(request.data))
    return TEXTS[kind].load(comm, request, say)


def requested_tokenizer(request: DataRequest) -> str | Tokenizer:
    """Return the model's tokenizer, or else the name of one."""
    if request.existing is not None and not _has_name(request.existing, request.tokenizer):
        raise DataError(
            f"the model's tokenizer is {request.existing.describe()}, not {request.tokenizer!r};"
            f" --tokenizer {AUTO} takes it"
        )
    return request.existing or (BYTE if request.tokenizer == AUTO else request.tokenizer)


class _PlainText:
    """One file of UTF-8. Rank 0 reads and tokenizes it; the ids travel as one plain buffer."""

    def refuse_missing(self, request: DataRequest) -> None:
        refuse_by_name(resolve_data(request.data))

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        of_root: list[tuple[Tokenizer, Ids]] = []

        def read() -> tuple[str, str, int, int]:
            """Return the tokenizer, type and number of ids, and how many of them are held out."""
            path = resolve_data(request.data)
            refuse_by_name(path)
            text, choice = read_text(path), requested_tokenizer(request)
            tokenizer = choice if isinstance(choice, Tokenizer) else build_tokenizer(choice, text)
            try:
                ids = tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            held_out = round(len(ids) * request.val_fraction)
            if len(ids) - held_out < 2 or (request.val_fraction and held_out < 2):
                aside = f", {held_out} of them for validation" if request.val_fraction else ""
                raise DataError(
                    f"{path} gives {count(len(ids), 'token')}{aside}: at least 2 are needed to learn"
                    f" what follows what (fewer than seq_len + 1 = {request.seq_len + 1} are repeated)"
                )
            of_root.append((tokenizer, ids))
            return tokenizer.to_json(), ids.dtype.name, len(ids), held_out

        saved, dtype, length, held_out = on_root(comm, read)
        tokenizer: Tokenizer
        ids: Ids
        if of_root:
            tokenizer, ids = of_root[0]
        else:
            tokenizer, ids = tokenizer_from_json(saved, "rank 0's tokenizer"), np.empty(length, dtype)
        comm.broadcast(ids)
        val, train = np.split(ids, [held_out])
        splits: dict[str, Tokens] = {"train": ArrayTokens(train)}
        if len(val):
            splits["val"] = ArrayTokens(val)
        return Corpus(tokenizer, splits)


class _Shards:
    """A folder of token shards."""

    def refuse_missing(self, request: DataRequest) -> None:
        path = resolve_data(request.data)
        made_with = shards_tokenizer(path, read_manifest(path))
        kind, _ = find_kind(request.tokenizer)
        if kind is None or kind.means is not None:  # else it had to be fetched
            _refuse_other_tokenizer(made_with, request, path)

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        return load_shards(comm, Path(on_root(comm, lambda: str(resolve_data(request.data)))), request, say)


TEXTS: Table[TextKind] = Table("texts", "a text of kind", {PLAIN: _PlainText(), SHARDS: _Shards()})


def load_shards(comm: Comm, folder: Path, request: DataRequest, say: Say) -> Corpus:
    """Load a folder of shards by rank 0's manifest; the ranks of a node share the verifying. Collective."""

    def describe() -> tuple[str, str]:
        manifest = read_manifest(folder)
        tokenizer = shards_tokenizer(folder, manifest)
        _refuse_other_tokenizer(tokenizer, request, folder)
        return manifest.to_json(), tokenizer.to_json()

    text, saved = on_root(comm, describe)
    manifest = Manifest.from_json(text, "rank 0's manifest")
    tokenizer = tokenizer_from_json(saved, str(folder))
    wanted = [shard for shard in manifest.shards if shard.split in request.splits]
    shards = wanted or list(manifest.shards)
    if request.verify and comm.rank == 0:
        say(f"verifying {sum(shard.tokens for shard in shards):,} tokens in {count(len(shards), 'shard')}")
    splits: dict[str, Tokens] = {}

    def problem() -> str:
        if not folder.is_dir():
            return f"{folder} is not there on this node: all nodes must share the disk it lies on"
        try:
            for split in dict.fromkeys(shard.split for shard in shards):
                splits[split] = ShardTokens(folder, manifest, split)
                if len(splits[split]) < 2:
                    return f"{folder} has a single token of split {split!r}: at least 2 are needed"
            if request.verify:
                verify_shards(folder, manifest, shards[comm.local_rank :: comm.local_size])
        except DistgptError as error:
            return str(error)
        return ""

    refuse_anywhere(comm, problem(), DataError)
    if "train" in request.splits and "train" not in splits:
        raise shared(DataError(f"{folder} holds no shards of split 'train'"))
    is_separated = manifest.separator == (tokenizer.separator,)
    return Corpus(tokenizer, splits, tokenizer.separator if is_separated else None)


def _refuse_other_tokenizer(tokenizer: Tokenizer, request: DataRequest, folder: Path) -> None:
    """Refuse shards whose ids are not those of the model's tokenizer, or of the requested one."""
    made_with = f"{folder} holds tokens of {tokenizer.describe()}"
    if request.existing is not None and fingerprint(request.existing) != fingerprint(tokenizer):
        raise DataError(f"{made_with}, but the model's tokenizer is {request.existing.describe()}")
    if not _has_name(tokenizer, request.tokenizer):
        raise DataError(
            f"{made_with}, not of {request.tokenizer!r}; --tokenizer {AUTO} takes the one they were made with"
        )


def _has_name(tokenizer: Tokenizer, name: str) -> bool:
    """Return whether `--tokenizer NAME` can mean this tokenizer."""
    return name == AUTO or can_mean(name, tokenizer)

"""From `--data` and `--val` to tokens on every rank: a text that rank 0 reads and shares, or shards of all.

Shards are given, or made of texts of other kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distgpt.comm.agree import on_root, refuse_anywhere, shared
from distgpt.comm.api import Comm
from distgpt.data.batches import ArrayTokens, Tokens
from distgpt.data.chats.examples import load_examples
from distgpt.data.hub import PREFIX
from distgpt.data.named import resolve_data
from distgpt.data.prepare.documents import FIELD, documents, find_inputs, is_plain
from distgpt.data.prepare.preparing import FROM_INPUTS
from distgpt.data.shards import (
    Manifest,
    ShardTokens,
    is_shards,
    read_manifest,
    shards_tokenizer,
    verify_shards,
)
from distgpt.data.tokenized import tokenized
from distgpt.data.tokenizers.bpe import GPT2_SIZE
from distgpt.data.tokenizers.learn import learn_entries
from distgpt.data.tokenizers.naming import (
    GPT2_FINGERPRINT,
    KINDS,
    Ids,
    Tokenizer,
    build_tokenizer,
    fingerprint,
    learned_size,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.data.unreadable import way_out
from distgpt.errors import DataError, DistgptError, Say
from distgpt.files import open_regular
from distgpt.formatting import count

LONGEST_PROMPT = 64 << 20  # bytes
BYTE = "byte"
AUTO = "auto"  # the tokenizer that shards were made with; of a text, its bytes


def refuse_missing(texts: Iterable[str], tokenizer: str) -> None:
    """Refuse files for training that are missing, shards of another tokenizer, and what cannot be read.

    Texts are not read, and tokenizers of a hub not downloaded.
    """
    for path in map(resolve_data, texts):
        if is_shards(path):
            made_with = shards_tokenizer(path, read_manifest(path))
            if not tokenizer.startswith(PREFIX):
                _refuse_other_tokenizer(made_with, DataRequest(str(path), tokenizer), path)
        elif not is_plain(path):
            find_inputs((path,))
    needs_no_file = tokenizer in (AUTO, *KINDS, "gpt2") or learned_size(tokenizer)
    if not needs_no_file and not tokenizer.startswith(PREFIX):
        load_tokenizer(tokenizer)


def read_text(path: Path, stream: BinaryIO | None = None) -> str:
    """A file's text: strict UTF-8, without a byte order mark, with \\n for line breaks, never empty.

    A `stream` is read instead, where one is given, up to a length that no prompt has.
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


def vocabulary_size(tokenizer: str, path: Path) -> int:
    """Return the vocabulary size. Reads the text only for tokenizers that are learned from it."""
    if tokenizer == "gpt2":
        return GPT2_SIZE
    if tokenizer in FROM_INPUTS:
        texts = [read_text(path)] if is_plain(path) else documents((path,), FIELD)
        return learn_entries(tokenizer, texts).size
    return learned_size(tokenizer) or load_tokenizer(BYTE if tokenizer == AUTO else tokenizer).size


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
    chats: bool = False  # `data` and `val` are examples to learn from
    kept: Path = Path("runs/tokenized")  # here lie texts of other kinds, tokenized


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens by split. A text is all for training, unless part of it is held out."""

    tokenizer: Tokenizer
    splits: dict[str, Tokens]
    separator: int | None = None  # the token before each document, if there is one

    @property
    def train(self) -> Tokens:
        return self.splits["train"]

    @property
    def val(self) -> Tokens | None:
        return self.splits.get("val")

    @property
    def held_out(self) -> Tokens:
        """Return what there is for validation: a part, or all where no part is."""
        return self.splits.get("val") or self.splits["train"]


def load_corpus(comm: Comm, request: DataRequest, say: Say = lambda text: None) -> Corpus:
    """Load the same corpus on every rank. What any rank finds wrong is raised on all of them. Collective."""
    if not request.val:
        return _load(comm, request, say)
    if not request.chats:
        on_root(comm, lambda: refuse_missing([request.val], AUTO))  # before the other text is tokenized
    corpus = _load(comm, replace(request, splits=("train",)), say)
    others = replace(request, data=request.val, tokenizer=AUTO, existing=corpus.tokenizer, splits=("val",))
    held_out = _load(comm, others, say).held_out
    return replace(corpus, splits={"train": corpus.train, "val": held_out})


def _load(comm: Comm, request: DataRequest, say: Say) -> Corpus:
    if request.chats:
        return _load_chats(comm, request, say)
    folder = on_root(comm, lambda: _folder_of_shards(request, say))
    return _load_shards(comm, Path(folder), request, say) if folder else _load_text(comm, request)


def _load_chats(comm: Comm, request: DataRequest, say: Say) -> Corpus:
    tokenizer, path = request.existing, Path(request.data)
    if tokenizer is None:
        raise shared(DataError("chats are read by the tokenizer of the weights, and these have none"))
    found = load_examples(comm, path, tokenizer, request.seq_len, request.val_fraction, say)
    return Corpus(tokenizer, dict(found))


def _folder_of_shards(request: DataRequest, say: Say) -> str:
    """Return where the shards of the data lie, which may have to be made; "" for a plain text."""
    path = resolve_data(request.data)
    if is_shards(path):
        return str(path)
    if is_plain(path):
        return ""
    return str(tokenized(path, _tokenizer(request), request.val_fraction, request.kept, say))


def _tokenizer(request: DataRequest) -> str | Tokenizer:
    """Return the model's tokenizer, or else the name of one."""
    if request.existing is not None and not _has_name(request.existing, request.tokenizer):
        raise DataError(
            f"the model's tokenizer is {request.existing.describe()}, not {request.tokenizer!r};"
            f" --tokenizer {AUTO} takes it"
        )
    return request.existing or (BYTE if request.tokenizer == AUTO else request.tokenizer)


def _load_text(comm: Comm, request: DataRequest) -> Corpus:
    """Rank 0 reads and tokenizes; the ids travel as one plain buffer."""
    of_root: list[Ids] = []

    def read() -> dict[str, Any]:
        path = resolve_data(request.data)
        tokenizer, ids = _tokenize(path, request)
        held_out = round(len(ids) * request.val_fraction)
        if len(ids) - held_out < 2 or (request.val_fraction and held_out < 2):
            aside = f", {held_out} of them for validation" if request.val_fraction else ""
            raise DataError(
                f"{path} gives {count(len(ids), 'token')}{aside}: at least 2 are needed to learn what follows"
                f" what (fewer than seq_len + 1 = {request.seq_len + 1} are repeated)"
            )
        of_root.append(ids)
        sizes = {"dtype": ids.dtype.name, "length": len(ids), "held_out": held_out}
        return {"tokenizer": tokenizer.to_json(), **sizes}

    found = on_root(comm, read)
    ids = of_root[0] if of_root else np.empty(found["length"], found["dtype"])
    comm.broadcast(ids)
    tokenizer = tokenizer_from_json(found["tokenizer"], "rank 0's tokenizer")
    val, train = np.split(ids, [found["held_out"]])
    splits: dict[str, Tokens] = {"train": ArrayTokens(train)}
    if len(val):
        splits["val"] = ArrayTokens(val)
    return Corpus(tokenizer, splits)


def _tokenize(path: Path, request: DataRequest) -> tuple[Tokenizer, Ids]:
    text, choice = read_text(path), _tokenizer(request)
    tokenizer = choice if isinstance(choice, Tokenizer) else build_tokenizer(choice, text)
    try:
        return tokenizer, tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _load_shards(comm: Comm, folder: Path, request: DataRequest, say: Say) -> Corpus:
    """Rank 0 says what there must be; the ranks of each node open it there, and share the verifying."""

    def describe() -> list[str]:
        manifest = read_manifest(folder)
        tokenizer = shards_tokenizer(folder, manifest)
        _refuse_other_tokenizer(tokenizer, request, folder)
        return [manifest.to_json(), tokenizer.to_json()]

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
    """The shards' ids must mean what the model, or the command, takes them for."""
    made_with = f"{folder} holds tokens of {tokenizer.describe()}"
    if request.existing is not None and fingerprint(request.existing) != fingerprint(tokenizer):
        raise DataError(f"{made_with}, but the model's tokenizer is {request.existing.describe()}")
    if not _has_name(tokenizer, request.tokenizer):
        raise DataError(
            f"{made_with}, not of {request.tokenizer!r}; --tokenizer {AUTO} takes the one they were made with"
        )


def _has_name(tokenizer: Tokenizer, name: str) -> bool:
    """Return if `--tokenizer NAME` can mean this tokenizer."""
    if name == AUTO:
        return True
    if name == "gpt2":  # known without its files
        return fingerprint(tokenizer) == GPT2_FINGERPRINT
    if name in KINDS:
        return tokenizer.kind == name
    if size := learned_size(name):
        return tokenizer.kind == "bpe" and tokenizer.size <= size
    return fingerprint(load_tokenizer(name)) == fingerprint(tokenizer)

"""From `--data` to tokens on every rank: a text that rank 0 reads and shares, or shards that all map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_root, refuse_anywhere, shared
from distgpt.comm.api import Comm
from distgpt.data.shards import (
    Manifest,
    ShardTokens,
    is_shards,
    read_manifest,
    shards_tokenizer,
    verify_shard,
)
from distgpt.data.text import read_text, resolve_data
from distgpt.data.tokenizers.naming import (
    GPT2_FINGERPRINT,
    KINDS,
    Ids,
    Tokenizer,
    build_tokenizer,
    fingerprint,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.data.tokens import ArrayTokens, Tokens
from distgpt.errors import DataError, DistgptError

AUTO = "auto"  # the tokenizer that shards were made with; of a text, its bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to load. `existing` is the tokenizer of a model that there is already."""

    data: str
    tokenizer: str = AUTO
    seq_len: int = 1
    val_fraction: float = 0.0  # of a text, its first part; shards are divided already
    verify: bool = True  # read the shards before anything else
    splits: tuple[str, ...] = ("train", "val")  # of shards
    existing: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens by split. A text is one for training, unless part of it is held out."""

    tokenizer: Tokenizer
    splits: dict[str, Tokens]
    is_text: bool

    @property
    def train(self) -> Tokens:
        return self.splits["train"]

    @property
    def val(self) -> Tokens | None:
        return self.splits.get("val")


def load_corpus(comm: Comm, wanted: Wanted, noted: Callable[[str], None] = lambda text: None) -> Corpus:
    """The same on every rank. What rank 0, or any rank, finds wrong is raised on all of them. Collective."""
    if on_root(comm, lambda: is_shards(resolve_data(wanted.data))):
        return _shards(comm, wanted, noted)
    return _text(comm, wanted)


def _text(comm: Comm, wanted: Wanted) -> Corpus:
    """The tokens travel as one plain buffer."""
    found: list[Ids] = []

    def read() -> dict[str, Any]:
        path = resolve_data(wanted.data)
        if path.is_dir():
            raise DataError(
                f"{path} is a directory without a manifest.json: distgpt data prepare makes shards of texts"
            )
        tokenizer, tokens = _tokenize(path, wanted)
        held_out = round(len(tokens) * wanted.val_fraction)
        if len(tokens) - held_out < 2 or (wanted.val_fraction and held_out < 2):
            aside = f", {held_out} of them for validation" if wanted.val_fraction else ""
            raise DataError(
                f"{path} gives {len(tokens)} token(s){aside}: at least 2 are needed to learn what follows"
                f" what (fewer than seq_len + 1 = {wanted.seq_len + 1} are repeated)"
            )
        found.append(tokens)
        about = {"dtype": tokens.dtype.name, "length": len(tokens), "held_out": held_out}
        return {"tokenizer": tokenizer.to_json(), **about}

    verdict = on_root(comm, read)
    tokens = found[0] if found else np.empty(verdict["length"], verdict["dtype"])
    comm.broadcast(tokens)
    tokenizer = tokenizer_from_json(verdict["tokenizer"], "rank 0's tokenizer")
    val, train = np.split(tokens, [verdict["held_out"]])
    splits: dict[str, Tokens] = {"train": ArrayTokens(train)}
    if len(val):
        splits["val"] = ArrayTokens(val)
    return Corpus(tokenizer, splits, is_text=True)


def _tokenize(path: Path, wanted: Wanted) -> tuple[Tokenizer, Ids]:
    text = read_text(path)
    if wanted.existing is not None and not _is_called(wanted.existing, wanted.tokenizer):
        raise DataError(
            f"the model's tokenizer is {wanted.existing.describe()}, not {wanted.tokenizer!r};"
            f" --tokenizer {AUTO} takes it"
        )
    choice = "byte" if wanted.tokenizer == AUTO else wanted.tokenizer
    tokenizer = wanted.existing or build_tokenizer(choice, text)
    try:
        return tokenizer, tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _shards(comm: Comm, wanted: Wanted, noted: Callable[[str], None]) -> Corpus:
    """Rank 0 says what there must be; the ranks of each node find it there, and share the reading."""

    def describe() -> list[str]:
        folder = resolve_data(wanted.data)
        manifest = read_manifest(folder)
        tokenizer = shards_tokenizer(folder, manifest)
        _refuse_another(tokenizer, wanted, folder)
        return [str(folder), manifest.to_json(), tokenizer.to_json()]

    path, text, tokenizer = on_root(comm, describe)
    folder, manifest = Path(path), Manifest.from_json(text, "rank 0's manifest")
    shards = [shard for shard in manifest.shards if shard.split in wanted.splits]
    if wanted.verify and comm.rank == 0:
        noted(f"verifying {sum(shard.tokens for shard in shards):,} tokens in {len(shards)} shard(s)")
    splits: dict[str, Tokens] = {}

    def open_all() -> None:
        for split in dict.fromkeys(shard.split for shard in shards):
            splits[split] = ShardTokens(folder, manifest, split)
            if len(splits[split]) < 2:
                raise DataError(
                    f"{folder} has a single token of split {split!r}: nothing can be learned of it"
                )
        for shard in shards[comm.local_rank :: comm.local_size] if wanted.verify else ():
            verify_shard(folder, manifest, shard)

    refuse_anywhere(comm, _complaint(open_all), DataError)
    if wanted.splits[0] not in splits:
        raise shared(DataError(f"{folder} holds no shards of split {wanted.splits[0]!r}"))
    return Corpus(tokenizer_from_json(tokenizer, str(folder)), splits, is_text=False)


def _complaint(work: Callable[[], None]) -> str:
    try:
        work()
    except DistgptError as error:
        return str(error)
    return ""


def _refuse_another(tokenizer: Tokenizer, wanted: Wanted, folder: Path) -> None:
    """The shards' ids must mean what the model, or the command, takes them for."""
    made_with = f"{folder} holds tokens of {tokenizer.describe()}"
    if wanted.existing is not None and fingerprint(wanted.existing) != fingerprint(tokenizer):
        raise DataError(f"{made_with}, but the model's tokenizer is {wanted.existing.describe()}")
    if not _is_called(tokenizer, wanted.tokenizer):
        raise DataError(
            f"{made_with}, not of {wanted.tokenizer!r}; --tokenizer {AUTO} takes the one they were made with"
        )


def _is_called(tokenizer: Tokenizer, word: str) -> bool:
    """Whether `--tokenizer WORD` may mean this one, which is there already."""
    if word == AUTO:
        return True
    if word == "gpt2":  # known without its files
        return fingerprint(tokenizer) == GPT2_FINGERPRINT
    if word in KINDS:
        return tokenizer.kind == word
    return fingerprint(load_tokenizer(word)) == fingerprint(tokenizer)

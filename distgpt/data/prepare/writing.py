"""What making shards takes in any order: the request, who watches, and shards that are begun and finished."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from distgpt.data.prepare.documents import MAX_DOCUMENT, Input, Piece, pieces
from distgpt.data.prepare.encoding import Encoded, Encoder, Separator, in_order
from distgpt.data.prepare.progress import Progress, Settings
from distgpt.data.shardfile import ShardReader, ShardWriter, shard_name
from distgpt.data.tokenizers.naming import Ids, Tokenizer, fingerprint, id_dtype
from distgpt.errors import UsageError

LEAST = 2  # tokens: one to see, one to predict


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


class Preparation(ABC):
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

    @abstractmethod
    def run(self) -> None:
        """Write all shards, or those that are missing. `progress` then describes all of them."""

    def _encoded(self, separator: tuple[int, ...]) -> closing[Generator[Encoded, None, None]]:
        """The ids of the pieces that are left."""
        request, progress = self._request, self._progress
        self._watcher.began(self._total, self._tokenizer.describe())
        todo = pieces(self._inputs, request.field, progress.place, request.max_document)
        encoder = Encoder(self._tokenizer, separator, request.field)
        return closing(in_order(encoder, todo, Piece.size, request.workers))

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

"""Training data from sources with weights: `--data notes.txt:3 --data books/:1`.

A source's share of the weights is its share of the sequences. Every block of `ROWS` sequences has the same
number from each source, evenly spaced with a seeded jitter. The kth sequence from a source is the kth of a
run over this source alone. So every sequence depends only on the seed and its number in the run.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import (
    GOLDEN,
    Batches,
    Sequences,
    Tokens,
    Window,
    mixed,
    seeded_hashes,
    windows_of,
)
from distgpt.core.data.loading import Corpus, DataRequest, load_one, refuse_missing
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import (
    AUTO,
    BYTE,
    Ids,
    find_kind,
    fingerprint,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.core.ops.api import Array
from distgpt.corpora.prepare.tokenized import texts_in
from distgpt.corpora.shards import is_shards, read_manifest, shards_tokenizer
from distgpt.corpora.tokenizers.bpe import not_empty

ROWS = 1 << 12  # shares are multiples of 1 / ROWS
SALT = 0x736F7572636573  # so that the order of the sources does not depend on the order of their windows
SOURCE = re.compile(r"(.+?):([^:,/\\]*)(?:,|$)", re.DOTALL)


def sources_of(data: str) -> dict[str, float]:
    """Return the sources in --data and their weights; {} if it names one text without a weight."""
    found, rest = SOURCE.findall(data), SOURCE.sub("", data)
    if not found or _exists(data) or (len(found) == 1 and not rest and not _exists(found[0][0])):
        return {}
    if rest:
        raise UsageError(f"--data {rest} must have a weight, as the other sources have: --data {rest}:1")
    result: dict[str, float] = {}
    for name, text in found:
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise UsageError(f"--data: the weight of {name!r} must be a number of at least 0, not {text!r}")
        result[name] = result.get(name, 0.0) + weight
    total = sum(result.values())
    if not total:
        raise UsageError("--data: at least one source must have a weight above 0")
    for name, weight in result.items():
        if 0 < weight < total / ROWS:
            raise UsageError(f"--data: the weight of {name!r} must be 0 or at least 1/{ROWS} of the sum")
    return {name: weight for name, weight in result.items() if weight}


def paths_of(data: str) -> dict[Path, float]:
    """Return the paths of all sources in --data, or of its only text, and their shares."""
    weights = sources_of(data) or {data: 1.0}
    return {resolve_data(name): weight / sum(weights.values()) for name, weight in weights.items()}


def _exists(name: str) -> bool:
    try:
        resolve_data(name)
        return True
    except DataError:
        return False


class JoinedTokens:
    """The tokens of all sources, one after another. The fingerprint includes the rows per block."""

    def __init__(self, parts: Sequence[Tokens], rows: Sequence[int]) -> None:
        self.parts, self._starts = parts, [0, *accumulate(map(len, parts))]
        content = " ".join(f"{part.fingerprint} {n}" for part, n in zip(parts, rows, strict=True))
        self.fingerprint = f"mixture:{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Ids:
        at, pieces = min(bisect_right(self._starts, start), len(self.parts)) - 1, list[Ids]()
        while not pieces or self._starts[at] < stop:
            begin, part = self._starts[at], self.parts[at]
            pieces.append(part.read(max(0, start - begin), min(len(part), stop - begin)))
            at += 1
        return np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class MixedCorpus(Corpus):
    names: tuple[str, ...] = ()
    sources: tuple[Corpus, ...] = ()
    rows: tuple[int, ...] = ()  # sequences per block, from each source

    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        """Return batches that take each block's sequences from one batch of every source."""
        each = [run.with_values({"batch_size": rows, "grad_accum": 0}) for rows in self.rows]
        sources = [source.batches(comm, own) for source, own in zip(self.sources, each, strict=True)]
        return MixedBatches(self, sources, run)

    def held_out_windows(self, seq_len: int, most: int) -> list[Window]:
        """Return windows of all held-out tokens, or of each source's first, in proportion."""
        held = self.held_out
        if not most or not isinstance(held, JoinedTokens):
            return windows_of(held, seq_len, most)
        each = (windows_of(part, seq_len, max(1, most * len(part) // len(held))) for part in held.parts)
        return [*chain(*each)]


class MixedBatches(Batches):
    """The global batches of a run over multiple sources."""

    def __init__(self, corpus: MixedCorpus, sources: Sequence[Batches], run: RunConfig) -> None:
        t = run.train
        super().__init__(corpus.train, run.model.seq_len, t.batch_size, t.seed)
        self.windows_per_epoch = sum(source.windows_per_epoch for source in sources)
        self._names, self._sources, self._rows = corpus.names, sources, np.array(corpus.rows)
        self._block, self._order_there = -1, (self._rows, self._rows)  # of the block read last

    def notes(self, steps: int) -> Iterator[str]:
        for name, source, rows in zip(self._names, self._sources, self._rows.tolist(), strict=True):
            read = rows / ROWS * steps * len(self._numbers) / source.windows_per_epoch
            share = f"{source.n_tokens:,} tokens, {rows / ROWS:.1%} of the sequences"
            yield f"{escape(name)}: {share}, read {read:.3g} times in {count(steps, 'step')}"
            yield from (f"{escape(name)}: {note}" for note in source.notes(steps))

    def sample(self, most: int) -> Ids:
        """Return at most about `most` tokens, from each source in proportion to its share."""
        shares = (self._rows / ROWS).tolist()
        whole = max(source.n_tokens / share for source, share in zip(self._sources, shares, strict=True))
        counts = [max(1, int(share * min(most, whole))) for share in shares]
        each = zip(self._sources, counts, strict=True)
        return np.concatenate([np.resize(source.sample(n), n) for source, n in each])

    def fill(
        self,
        step: int,
        which: slice,
        x_out: Sequences,
        y_out: Sequences,
        positions_out: Sequences | None = None,
    ) -> None:
        blocks, places = np.divmod(self._numbers_of(step, which), np.uint64(ROWS))
        for block in np.unique(blocks).tolist():
            if block != self._block:
                self._block, self._order_there = block, self._order_of(block)
            drawn, own = (part[places] for part in self._order_there)
            for number, source in enumerate(self._sources):
                at = np.flatnonzero((blocks == block) & (drawn == number))
                if at.size:
                    x, y = x_out[at], y_out[at]
                    positions = None if positions_out is None else positions_out[at]
                    first = int(own[at[0]])
                    source.fill(block, slice(first, first + len(at)), x, y, positions)
                    x_out[at], y_out[at] = x, y
                    if positions_out is not None and positions is not None:
                        positions_out[at] = positions

    def _order_of(self, block: int) -> tuple[Array, Array]:
        """Return the source of each sequence in a block, and its number among the block's from there."""
        source = np.repeat(np.arange(len(self._rows)), self._rows)
        own = np.concatenate([np.arange(rows) for rows in self._rows])
        key = seeded_hashes(self._seed ^ SALT, np.array([block], np.uint64))
        hashes = mixed(key + np.arange(ROWS, dtype=np.uint64) * np.uint64(GOLDEN))
        places = (own + (hashes >> np.uint64(11)) / 2.0**53) / self._rows[source]
        order = np.argsort(places, kind="stable")
        return source[order], own[order]


class _Mixture:
    """The data kind of sources with weights."""

    def refuse_missing(self, request: DataRequest) -> None:
        refuse_missing(sources_of(request.data), request.tokenizer)

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        weights = on_root(comm, lambda: sources_of(request.data))
        if len(weights) == 1:
            return load_one(comm, replace(request, data=next(iter(weights))), say)
        shared = request.existing or tokenizer_from_json(
            on_root(comm, lambda: _shared_tokenizer(request.tokenizer, [*weights])), "rank 0's tokenizer"
        )
        each = [load_one(comm, replace(request, data=name, existing=shared), say) for name in weights]
        exact = np.array([*weights.values()]) / sum(weights.values()) * ROWS
        rows = exact.astype(np.int64)
        rows[np.argsort(rows - exact, kind="stable")[: ROWS - rows.sum()]] += 1
        held = [corpus.val for corpus in each if corpus.val is not None]
        return MixedCorpus(
            shared,
            JoinedTokens([corpus.train for corpus in each], rows.tolist()),
            JoinedTokens(held, [1] * len(held)) if held else None,
            each[0].separator if len({corpus.separator for corpus in each}) == 1 else None,
            tuple(dict.fromkeys(chain(*(corpus.notes for corpus in each)))),
            names=tuple(weights),
            sources=tuple(each),
            rows=tuple(rows.tolist()),
        )


MIXTURE = _Mixture()


def _shared_tokenizer(tokenizer: str, names: list[str]) -> str:
    """Return the saved form of the shards' tokenizer, or of one that is named or learned from all sources."""
    paths = [*map(resolve_data, names)]
    folders = [path for path in paths if is_shards(path)]
    made = [shards_tokenizer(folder, read_manifest(folder)) for folder in folders]
    for folder, other in zip(folders, made, strict=True):
        if fingerprint(other) != fingerprint(made[0]):
            raise DataError(
                f"{folders[0]} and {folder} have different tokenizers; prepare both with the same one"
            )
    kind, argument = find_kind(tokenizer)
    if made:
        return made[0].to_json()
    if kind is not None and kind.learn is not None:
        return kind.learn(argument, not_empty(texts_in(*paths)), True).to_json()
    return load_tokenizer(BYTE if tokenizer == AUTO else tokenizer).to_json()

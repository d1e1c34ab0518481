"""Which tokens each step sees: a function of seed and step alone, the same for every number of ranks.

The corpus is a ring of n tokens. An epoch cuts it into W = ⌈n / T⌉ windows of T tokens (the last one wraps
around into the first). With `shift` they begin 0 to T - 1 tokens in, drawn per epoch: the cuts move, and a
model of a short text learns more than where they are. The windows come in a seeded order, each once per
epoch. Sequence number g = step · B + row lies in epoch g ÷ W at place g mod W. Any step can be asked for
at any time, so there is nothing to save for a resumed run but how many batches were left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple, Protocol, Self
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.config import RunConfig
from distgpt.core.ops.api import Array

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ ÷ the golden ratio: its multiples spread evenly
PIECE = 1 << 16  # tokens of a sample that are read together
SALTS = np.arange(1, 9, dtype=np.uint64) * GOLDEN  # one per Feistel round; an even number of them


class Tokens(Protocol):
    """A sequence of token ids, of which only the part being read need lie in memory.

    `fingerprint` tells one content from another.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Array:
        """The ids [start, stop), for 0 ≤ start ≤ stop ≤ length; uint16 or uint32, maybe a view."""


class Window(NamedTuple):
    """Tokens to score, each but the first predicted from those before it."""

    ids: Array
    learned: Array | None = None  # which predictions count: bool, one for each but the first id; None: all


def windows_of(tokens: Tokens, seq_len: int, most: int = 0) -> list[Window]:
    """Cut the first `most` tokens (0: all) into windows as long as the context: each is predicted once."""
    end = min(most + 1, len(tokens)) if most else len(tokens)
    starts = range(0, end - 1, seq_len)
    return [Window(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]


class ArrayTokens:
    """All of them in one array."""

    def __init__(self, ids: Array) -> None:
        self._ids = ids
        self.fingerprint = f"crc32:{crc32(ids.data.cast('B')):08x}"

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Array:
        return self._ids[start:stop]


class Batches:
    """The global batches of one run: B windows of T tokens and, shifted by one, their targets."""

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int, shift: bool = True) -> None:
        self._tokens = tokens
        self.seq_len = seq_len
        self._rows = np.arange(batch_size, dtype=np.uint64)
        self._seed = seed
        self._shift = np.uint64(shift)
        self.skipped = 0  # batches that are left out from here on
        self.tokens, self.fingerprint = len(tokens), tokens.fingerprint
        self.windows_per_epoch = -(-len(tokens) // seq_len)

    @classmethod
    def of_run(cls, tokens: Tokens, run: RunConfig) -> Self:
        """Return the batches of a run over these tokens."""
        t = run.train
        return cls(tokens, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)

    def notes(self, steps: int) -> Iterator[str]:
        """Yield what people may not expect of these batches in a run of this many steps."""
        if self.tokens < (window := self.seq_len + 1):
            few = f"the training text has {self.tokens} tokens, fewer than seq_len + 1 = {window}"
            yield f"{few}: sequences repeat it"

    def sample(self, most: int) -> Array:
        """Return the text's tokens, or so many of them: pieces at even distances."""
        if self.tokens <= most:
            return self._tokens.read(0, self.tokens)
        starts = np.linspace(0, self.tokens - PIECE, most // PIECE).astype(int).tolist()
        return np.concatenate([self._tokens.read(start, start + PIECE) for start in starts])

    def windows(self, step: int) -> Array:
        """Return the places in the corpus where the rows of this step's global batch begin: int64 (B,)."""
        return self._starts(step, slice(None))

    def learned_fraction(self, step: int) -> float:
        """Return the part of the targets of this step's global batch that are learned."""
        return 1.0

    def fill(
        self, step: int, rows: slice, x_out: Array, y_out: Array, positions_out: Array | None = None
    ) -> None:
        """x_out, y_out (n, T) int32 ← inputs and targets of these n rows of the global batch.

        positions_out: as in core/ops/api.py, for documents side by side.
        """
        starts = self._starts(step, rows).tolist()
        for start, x, y in zip(starts, x_out, y_out, strict=True):
            window = self._window(start)
            x[:] = window[:-1]
            y[:] = window[1:]

    def _window(self, start: int) -> Array:
        """T + 1 tokens from this place on around the ring, which may be shorter than that."""
        length, missing, pieces = len(self._tokens), self.seq_len + 1, []
        while missing:
            stop = min(start + missing, length)
            pieces.append(self._tokens.read(start, stop))
            missing -= stop - start
            start = 0
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _starts(self, step: int, rows: slice) -> Array:
        window, key = self._order(step, rows)
        shift = _mix(key) % self.seq_len * self._shift
        return ((window * self.seq_len + shift) % len(self._tokens)).astype(np.int64)

    def _order(self, step: int, rows: slice) -> tuple[Array, Array]:
        """Return the window of each row, and the key of its epoch, all uint64 (n,)."""
        sequence = self._rows[rows] + np.uint64((step + self.skipped) * len(self._rows))
        epoch, place = np.divmod(sequence, np.uint64(self.windows_per_epoch))
        key = seeded_hashes(self._seed, epoch)
        return shuffled(place, key, self.windows_per_epoch), key


def shuffled(place: Array, key: Array, count: int) -> Array:
    """Permute places in [0, count), each by the permutation that its key selects; all uint64 (n,).

    A Feistel network on pairs (left, right) with left · b + right = place and a · b just above `count`:
    every round adds to one half a hash of the other, which can be undone, so no two places meet. A place
    that leaves [0, count) is permuted again until it is back (cycle walking), which keeps that property.
    """
    root = isqrt(count - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-count // root))
    result = _feistel(place, key, a, b)
    while (outside := np.flatnonzero(result >= count)).size:
        result[outside] = _feistel(result[outside], key[outside], a, b)
    return result


def rank_rows(batch_size: int, rank: int, size: int, micro_batch: int, grad_accum: int) -> slice:
    """The rows of the global batch that one rank works on in one micro-batch.

    Micro-batch m holds rows [m·B/A, (m+1)·B/A), split evenly among the ranks.
    """
    refuse_uneven(batch_size, size, grad_accum)
    each = batch_size // (size * grad_accum)
    start = (micro_batch * size + rank) * each
    return slice(start, start + each)


def refuse_uneven(batch_size: int, size: int, grad_accum: int) -> None:
    """Raise a UsageError unless the batch splits evenly into ranks and micro-batches."""
    parts = size * grad_accum
    each, rest = divmod(batch_size, parts)
    if rest:
        options = [n * parts for n in (each, each + 1) if n]
        micro_batches = f"{grad_accum} micro-batch{'' if grad_accum == 1 else 'es'}"
        raise UsageError(
            f"batch_size {batch_size} cannot be split evenly into {count(size, 'rank')} × {micro_batches};"
            f" the nearest that can: {' or '.join(map(str, options))}"
        )


def _feistel(place: Array, key: Array, a: np.uint64, b: np.uint64) -> Array:
    left, right = np.divmod(place, b)
    for salt in SALTS:
        left, right = right, (left + _mix(key + right + salt) % a) % a
        a, b = b, a
    return left * b + right


def seeded_hashes(seed: int, numbers: Array) -> Array:
    """A random number for each of these, always the same for a seed: uint64 (n,)."""
    of_seed = _mix(np.array([seed % 2**64], np.uint64))
    return _mix(of_seed + numbers * GOLDEN)


def _mix(z: Array) -> Array:
    """The finishing steps of splitmix64: every bit of the result depends on every bit of z, uint64 (n,)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    mixed: Array = z ^ (z >> 31)
    return mixed

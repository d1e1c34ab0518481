"""The tokens of each step: a function of seed and step alone, the same for every number of ranks.

The corpus is a ring of n tokens. An epoch cuts it into W = ⌈n / T⌉ windows of T tokens (the last one wraps
around into the first). With `shift` they begin 0 to T - 1 tokens in, drawn per epoch: the cuts move, and a
model of a short text learns more than their positions. The windows come in a seeded order, each once per
epoch. Sequence i of a step's batch has number g = (step + skipped) · B + i: it lies in epoch g ÷ W at
position g mod W. Any step can be computed at any time, so a checkpoint saves nothing of them but `skipped`:
how many batches were left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple, Protocol, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.config import RunConfig
from distgpt.core.data.tokenizers import Ids

Words = NDArray[np.uint64]
Sequences = NDArray[np.int32]  # (n, T)

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ ÷ the golden ratio: its multiples spread evenly (Knuth; splitmix64)
SAMPLE_PIECE = 1 << 16  # tokens of a sample that are read together
# One per Feistel round. An even number of rounds, so that the halves are back in their places.
SALTS = np.arange(1, 9, dtype=np.uint64) * GOLDEN


class Batches:
    """The global batches of one run: B windows of T tokens and, shifted by one, their targets."""

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int, shift: bool = True) -> None:
        self._tokens = tokens
        self.seq_len = seq_len
        self._numbers = np.arange(batch_size, dtype=np.uint64)  # of the sequences in a batch
        self._seed = seed
        self._shift = np.uint64(shift)
        self.skipped = 0  # batches that were left out: this is added to every later step's number
        self.n_tokens = len(tokens)
        self.fingerprint = tokens.fingerprint
        self.windows_per_epoch = -(-len(tokens) // seq_len)

    @classmethod
    def of_run(cls, tokens: Tokens, run: RunConfig) -> Self:
        """Return the batches of a run over these tokens."""
        t = run.train
        return cls(tokens, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)

    def notes(self, steps: int) -> Iterator[str]:
        """Yield notes about these batches that people may not expect, for a run of this many steps."""
        if self.n_tokens < (window := self.seq_len + 1):
            few = f"the training text has {self.n_tokens} tokens, fewer than seq_len + 1 = {window}"
            yield f"{few}: sequences repeat it"

    def sample(self, most: int) -> Ids:
        """Return the text's tokens, or at most this many (> 0) of them: pieces at even distances."""
        if self.n_tokens <= most:
            return self._tokens.read(0, self.n_tokens)
        piece = min(SAMPLE_PIECE, most)
        starts = np.linspace(0, self.n_tokens - piece, most // piece).astype(int).tolist()
        return np.concatenate([self._tokens.read(start, start + piece) for start in starts])

    def counted_fraction(self, step: int) -> float:
        """Return the fraction of targets that the loss counts in this step's global batch."""
        return 1.0

    def fill(
        self,
        step: int,
        which: slice,
        x_out: Sequences,
        y_out: Sequences,
        positions_out: Sequences | None = None,
    ) -> None:
        """x_out, y_out ← inputs and targets of these n sequences of the global batch.

        positions_out: as in core/ops/kernels.py, for subclasses that pack examples; not used here.
        """
        starts = self._starts(step, which).tolist()
        for start, x, y in zip(starts, x_out, y_out, strict=True):
            window = self._window(start)
            x[:] = window[:-1]
            y[:] = window[1:]

    def _window(self, start: int) -> Ids:
        """Return T + 1 tokens from this position on around the ring, which may be shorter than that."""
        length = len(self._tokens)
        missing = self.seq_len + 1
        pieces: list[Ids] = []
        while missing:
            stop = min(start + missing, length)
            pieces.append(self._tokens.read(start, stop))
            missing -= stop - start
            start = 0
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _starts(self, step: int, which: slice) -> NDArray[np.int64]:
        window, key = self._order(step, which)
        shift = _mix(key) % self.seq_len * self._shift
        return ((window * self.seq_len + shift) % len(self._tokens)).astype(np.int64)

    def _order(self, step: int, which: slice) -> tuple[Words, Words]:
        """Return the window of each sequence, and the key of its epoch: (n,)."""
        sequence = self._numbers[which] + np.uint64((step + self.skipped) * len(self._numbers))
        epoch, position = np.divmod(sequence, np.uint64(self.windows_per_epoch))
        key = seeded_hashes(self._seed, epoch)
        return shuffled(position, key, self.windows_per_epoch), key


def shuffled(position: Words, key: Words, n: int) -> Words:
    """Permute positions in [0, n), each by the permutation that its key selects.

    A Feistel network on pairs (left, right) with left · b + right = position and a · b just above n:
    every round adds to one half a hash of the other, which can be undone, so no two positions meet. One that
    leaves [0, n) is permuted again until it is back (cycle walking), which keeps that property.
    """
    root = isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    result = _feistel(position, key, a, b)
    while (outside := np.flatnonzero(result >= n)).size:
        result[outside] = _feistel(result[outside], key[outside], a, b)
    return result


def rank_sequences(batch_size: int, rank: int, size: int, micro_batch: int, grad_accum: int) -> slice:
    """Return the sequences of the global batch that one rank computes in one micro-batch.

    Micro-batch m holds sequences [m·B/A, (m+1)·B/A), split evenly among the ranks.
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


def _feistel(position: Words, key: Words, a: np.uint64, b: np.uint64) -> Words:
    left, right = np.divmod(position, b)
    for salt in SALTS:
        left, right = right, (left + _mix(key + right + salt) % a) % a
        a, b = b, a
    return left * b + right


def seeded_hashes(seed: int, numbers: Words) -> Words:
    """Return a random number for each of these, always the same for a seed: (n,)."""
    of_seed = _mix(np.array([seed % 2**64], np.uint64))
    return _mix(of_seed + numbers * GOLDEN)


def _mix(z: Words) -> Words:
    """Apply the last steps of splitmix64: every bit of the result depends on every bit of z."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Tokens(Protocol):
    """A sequence of token ids, of which only the part being read need lie in memory.

    `fingerprint` identifies its content.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids [start, stop), for 0 ≤ start ≤ stop ≤ length; uint16 or uint32, maybe a view."""


class ArrayTokens:
    """Tokens in one array."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self.fingerprint = f"crc32:{crc32(ids.data.cast('B')):08x}"

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Ids:
        return self._ids[start:stop]


class Window(NamedTuple):
    """Tokens to score, each but the first predicted from those before it."""

    ids: Ids
    counted: NDArray[np.bool_] | None = None  # whether the loss counts each id but the first; None: all


def windows_of(tokens: Tokens, seq_len: int, most: int = 0) -> list[Window]:
    """Cut the first `most` tokens (0: all) into windows as long as the context: each is predicted once."""
    end = min(most + 1, len(tokens)) if most else len(tokens)
    starts = range(0, end - 1, seq_len)
    return [Window(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]

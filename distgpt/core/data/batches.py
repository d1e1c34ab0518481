"""The tokens of each step: a function of only seed and step, the same for any number of ranks.

The corpus is a ring of n tokens. An epoch cuts it into W = ⌈n / T⌉ windows of T tokens; the last window wraps
around. With `shift`, the cuts move by 0 to T - 1 tokens, drawn per epoch, so that a model of a short text
learns more than absolute positions. Each epoch visits every window once, in a seeded order. Sequence i of a
step's batch has the number g = (step + skipped) · B + i. It is in epoch g ÷ W at position g mod W. Any step
can be computed independently, so a checkpoint saves only `skipped`, the number of skipped batches.
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

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ ÷ golden ratio; its multiples spread evenly (Knuth, splitmix64)
SAMPLE_PIECE = 1 << 16  # tokens per contiguous piece of a sample
# One per Feistel round. With an even number of rounds, the halves end in their original places.
SALTS = np.arange(1, 9, dtype=np.uint64) * GOLDEN


class Batches:
    """The global batches of a run: B windows of T tokens, and the windows shifted by one as targets."""

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int, shift: bool = True) -> None:
        self._tokens = tokens
        self.seq_len = seq_len
        self._numbers = np.arange(batch_size, dtype=np.uint64)  # sequence numbers within a batch
        self._seed = seed
        self._shift = np.uint64(shift)
        self.skipped = 0  # skipped batches, added to the number of every later step
        self.n_tokens = len(tokens)
        self.fingerprint = tokens.fingerprint
        self.windows_per_epoch = -(-len(tokens) // seq_len)

    @classmethod
    def of_run(cls, tokens: Tokens, run: RunConfig) -> Self:
        t = run.train
        return cls(tokens, run.model.seq_len, t.batch_size, t.seed, t.shift_windows)

    def notes(self, steps: int) -> Iterator[str]:
        """Yield warnings about these batches for a run of `steps` steps."""
        if self.n_tokens < (window := self.seq_len + 1):
            few = f"the training text has {self.n_tokens} tokens, fewer than seq_len + 1 = {window}"
            yield f"{few}, so sequences repeat it"

    def sample(self, most: int) -> Ids:
        """Return at most `most` (> 0) tokens of the text, in evenly spaced pieces."""
        if self.n_tokens <= most:
            return self._tokens.read(0, self.n_tokens)
        piece = min(SAMPLE_PIECE, most)
        starts = np.linspace(0, self.n_tokens - piece, most // piece).astype(int).tolist()
        return np.concatenate([self._tokens.read(start, start + piece) for start in starts])

    def counted_fraction(self, step: int) -> float:
        """Return the fraction of targets that count in the loss of this step's global batch."""
        return 1.0

    def fill(
        self,
        step: int,
        which: slice,
        x_out: Sequences,
        y_out: Sequences,
        positions_out: Sequences | None = None,
    ) -> None:
        """x_out, y_out ← inputs and targets of n sequences of the global batch.

        positions_out: see core/ops/kernels.py. For subclasses that pack examples; unused here.
        """
        starts = self._starts(step, which).tolist()
        for start, x, y in zip(starts, x_out, y_out, strict=True):
            window = self._window(start)
            x[:] = window[:-1]
            y[:] = window[1:]

    def _window(self, start: int) -> Ids:
        """Return T + 1 tokens from a position on, around the ring, which may be shorter."""
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
        shift = mixed(key) % self.seq_len * self._shift
        return ((window * self.seq_len + shift) % len(self._tokens)).astype(np.int64)

    def _numbers_of(self, step: int, which: slice) -> Words:
        """Return the numbers of sequences in the whole run: (n,)."""
        return self._numbers[which] + np.uint64((step + self.skipped) * len(self._numbers))

    def _order(self, step: int, which: slice) -> tuple[Words, Words]:
        """Return each sequence's window and its epoch's key: (n,)."""
        epoch, position = np.divmod(self._numbers_of(step, which), np.uint64(self.windows_per_epoch))
        key = seeded_hashes(self._seed, epoch)
        return shuffled(position, key, self.windows_per_epoch), key


def shuffled(position: Words, key: Words, n: int) -> Words:
    """Permute positions in [0, n), each by the permutation that its key selects.

    This is a Feistel network on pairs (left, right) with left · b + right = position and a · b just above n.
    Each round adds a hash of one half to the other. Rounds are invertible, so positions stay distinct. A
    result outside [0, n) is permuted again until it is inside (cycle walking), which keeps positions
    distinct.
    """
    root = isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    result = _feistel(position, key, a, b)
    while (outside := np.flatnonzero(result >= n)).size:
        result[outside] = _feistel(result[outside], key[outside], a, b)
    return result


def rank_sequences(batch_size: int, rank: int, size: int, micro_batch: int, grad_accum: int) -> slice:
    """Return the sequences of the global batch that a rank computes in a micro-batch.

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
            f"batch_size {batch_size} must be a multiple of {count(size, 'rank')} × {micro_batches};"
            f" use {' or '.join(map(str, options))}"
        )


def _feistel(position: Words, key: Words, a: np.uint64, b: np.uint64) -> Words:
    left, right = np.divmod(position, b)
    for salt in SALTS:
        left, right = right, (left + mixed(key + right + salt) % a) % a
        a, b = b, a
    return left * b + right


def seeded_hashes(seed: int, numbers: Words) -> Words:
    """Return a deterministic random number for each of `numbers`: (n,)."""
    of_seed = mixed(np.array([seed % 2**64], np.uint64))
    return mixed(of_seed + numbers * GOLDEN)


def mixed(z: Words) -> Words:
    """Apply the finalizer of splitmix64: every bit of the result depends on every bit of z."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Tokens(Protocol):
    """A sequence of token ids, which need not be in memory as a whole.

    `fingerprint` identifies its content.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ids:
        """Return the ids [start, stop), for 0 ≤ start ≤ stop ≤ length, as uint16 or uint32; may be a view."""


class ArrayTokens:
    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self.fingerprint = f"crc32:{crc32(ids.data.cast('B')):08x}"

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Ids:
        return self._ids[start:stop]


class Window(NamedTuple):
    """Tokens to score. Each except the first is predicted from its predecessors."""

    ids: Ids
    loss_mask: NDArray[np.bool_] | None = None  # whether each id except the first counts; None: every id does


def windows_of(tokens: Tokens, seq_len: int, most: int = 0) -> list[Window]:
    """Cut the first `most` tokens (0: all) into context-sized windows that predict each token once."""
    end = min(most + 1, len(tokens)) if most else len(tokens)
    starts = range(0, end - 1, seq_len)
    return [Window(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]

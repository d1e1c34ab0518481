"""Lanes on CPU cores whose tokens take one compiled call per thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distgpt.inference.lanes import Feed
from distgpt.interrupts import held
from distgpt.kernels.api import Array
from distgpt.kernels.decoding import meeting, walk
from distgpt.kernels.decoding.attending import cache_of, own_memory
from distgpt.kernels.decoding.weights import packed_weights
from distgpt.kernels.matmul.packing import aligned
from distgpt.kernels.pool import pool_of
from distgpt.model.layers import Rope
from distgpt.model.model import Model

ROWS = 512  # tokens of one call; more go through in parts
WORTHWHILE = 1 << 20  # parameters from which on it pays to wake other threads for a token


class CompiledLanes:
    """`count` sequences of at most the context's length; float32, or bfloat16 weights and cache."""

    def __init__(self, model: Model, count: int) -> None:
        config, k = model.config, model.kernels
        self.count, self.length = count, config.seq_len
        dtype, positions = k.dtype.name, model.positions
        angles = positions.angles if isinstance(positions, Rope) else None
        self._weights = packed_weights(config, model.params, angles)
        self._cache = cache_of(config, count, dtype)
        self._kind = walk.kind_of(config)
        self._rows = _rows(config.n_embd, config.hidden, min(ROWS, max(count, config.seq_len)), dtype)
        threads = k.threads if model.layout.size >= WORTHWHILE else 1
        self._pool = pool_of(threads)
        self._own = [own_memory(config, dtype) for _ in range(threads)]
        self._counter = meeting.counter()

    def feed(self, work: Sequence[Feed]) -> Array:
        scores = np.empty((sum(each.scored for each in work), self._kind.vocab), np.float32)
        done = 0
        for part in _parts(work, len(self._rows.s)):
            count = sum(each.scored for each in part)
            self._walk(part, scores[done : done + count])
            done += count
        return scores

    def copy(self, source: int, target: int, length: int) -> None:
        for array in self._cache:
            array[:, target] = array[:, source]

    def _walk(self, part: Sequence[Feed], scores: Array) -> None:
        """A call of the walk. Compiled loops trust what they get: so it is looked at here."""
        tokens: list[int] = []
        feeds: list[tuple[int, int, int, int]] = []
        scored: list[int] = []
        for each in part:
            feeds.append((len(tokens), len(each.tokens), each.lane, each.start))
            tokens.extend(each.tokens)
            scored.extend(range(len(tokens) - each.scored, len(tokens)))
            if not (0 <= each.lane < self.count and 0 <= each.start <= self.length - len(each.tokens)):
                raise ValueError(f"{each} does not fit {self.count} lanes of {self.length} positions")
        ids, places, wanted = (np.array(x, np.int64) for x in (tokens, feeds, scored))
        if ids.min() < 0 or ids.max() >= self._kind.vocab:
            raise ValueError(f"tokens must lie in [0, {self._kind.vocab})")
        work = walk.Work(ids, places.reshape(-1, 4), wanted, scores)
        fixed = self._kind, self._weights, self._rows, self._cache, work
        threads = len(self._own)
        if threads == 1:
            walk.walk(0, 1, *fixed, self._own[0], self._counter)
            return
        with held():  # all threads have to come to where they meet
            self._counter[0] = 0
            self._pool.run(lambda i: walk.walk(i, threads, *fixed, self._own[i], self._counter), threads)


def _rows(width: int, hidden: int, count: int, dtype: str) -> walk.Rows:
    def rows(columns: int, dtype: str) -> Array:
        """Whole units, and rows whose distance is no multiple of 4 KB."""
        return aligned((count, -(-columns // 64) * 64 + 32), dtype)

    wide = "float32"
    return walk.Rows(
        s=rows(width, wide),
        qkv=rows(3 * width, wide),
        att=rows(width, wide),
        pre=rows(-(-hidden // 64) * 64, wide),
        gates=rows(-(-hidden // 64) * 64, wide),
        a=rows(width, dtype),
        h=rows(hidden, dtype),
    )


def _parts(work: Sequence[Feed], most: int) -> list[list[Feed]]:
    """Feeds, or pieces of them, of at most so many tokens together."""
    parts: list[list[Feed]] = [[]]
    room = most
    for lane, start, tokens, scored in work:
        done = 0
        while done < len(tokens):
            if not room:
                parts.append([])
                room = most
            piece = tokens[done : done + room]
            after = len(tokens) - done - len(piece)
            parts[-1].append(Feed(lane, start + done, piece, max(0, min(scored - after, len(piece)))))
            done += len(piece)
            room -= len(piece)
    return parts

"""The vocabulary on CPU cores: compiled loops and BLAS, each split over the crew of one thread pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgpt.kernels.api import (
    PIECE,
    AdamConstants,
    AdamState,
    Affine,
    Angles,
    Array,
    Bias,
    Head,
    OuterState,
    Stats,
)
from distgpt.kernels.fused import abreast, attention, blas, heads, linear, optimizer, rowwise
from distgpt.kernels.immediate import Immediate
from distgpt.kernels.matmul import choice
from distgpt.kernels.matmul.layers import Matmuls
from distgpt.kernels.pool import COLUMNS, ROWS, WorkerMemory, pool_of

WORTHWHILE = 1 << 17  # elements to read: below that, waking a worker takes longer than the work


class CpuKernels(Immediate):
    """`threads` workers, the caller included; the BLAS runs inside each at one thread.

    `matmul` says what computes float32 matmuls: our own kernels, the BLAS, or whichever is faster here.
    """

    logits_bytes = 128 << 20
    in_place = True
    adds = False
    norm_sums = 0
    sums_biases = False  # each worker passes over rows of its own
    few = 3  # rows up to which a linear layer is bound by reading w
    loss_loop = staticmethod(rowwise.cross_entropy)

    def __init__(self, dtype: str = "float32", threads: int = 1, matmul: str = "auto") -> None:
        self.dtype = self.wide = np.dtype(dtype)
        self.threads = threads
        self._split_freely = matmul == "auto"  # else bits must not depend on how work is split
        self._pool = pool_of(threads)
        self._memory = WorkerMemory(self._pool)
        blas.single_threaded()
        self.matmuls = self._matmuls(matmul)

    def _matmuls(self, matmul: str) -> Matmuls:
        return choice.matmuls(self._pool, self.dtype, matmul)

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        return np.zeros(shape, self.dtype)

    def wide_zeros(self, *shape: int) -> Array:
        return np.zeros(shape, self.wide)

    def scalars(self, count: int) -> Array:
        return np.zeros(count)

    def integers(self, host: Any, dtype: str = "int32") -> Array:
        return np.array(host, dtype)

    def to_host(self, array: Array) -> Any:
        return array

    def later(self, array: Array) -> Callable[[], Any]:
        taken = array.copy()
        return lambda: taken

    def put(self, array: Array, host: Any) -> None:
        if host is not array:
            array[...] = host

    def round(self, low: Array, wide: Array) -> None:
        np.copyto(low, wide)

    def each(self, work: Callable[[int], None], count: int) -> None:
        self._pool.run(work, count)

    def share(self, work: Callable[[], None]) -> None:
        self._pool.share(work)

    def zero(self, x: Array) -> None:
        x[...] = 0

    def add(self, y: Array, a: Array, b: Array) -> None:
        np.add(a, b, out=y)

    # -- embedding

    def embed(
        self, x: Array, tokens: Array, wte: Array, wpe: Array | None, seq_len: int, start: Array | None
    ) -> None:
        added = None if wpe is None else wpe[places(seq_len, start)]
        self._pool.ranges(len(x), ROWS, rowwise.embed, x, tokens, wte, added)

    def embed_backward(self, dwte: Array, dwpe: Array | None, dx: Array, tokens: Array, seq_len: int) -> None:
        columns = dx.shape[1]
        self._pool.ranges(columns, COLUMNS, rowwise.embed_backward, dwte, dwpe, dx, tokens, seq_len)

    # -- norms

    def add_norm(
        self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None, wb: Affine, eps: float
    ) -> None:
        self._pool.ranges(len(y), ROWS, rowwise.add_norm, y, s, *stats, x, r, *wb, eps)

    def norm_backward(
        self,
        dx: Array,
        y: Array | None,
        sums: Array | None,
        dy: Array,
        dres: Array | None,
        s: Array,
        stats: Stats,
        wb: Affine,
    ) -> None:
        self._pool.ranges(len(dx), ROWS, rowwise.norm_backward, dx, y, dy, dres, s, *stats, *wb)

    def norm_backward_weights(
        self, dwb: Affine, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool
    ) -> None:
        self._pool.ranges(s.shape[1], COLUMNS, rowwise.norm_backward_weights, *dwb, dy, s, *stats, accumulate)

    # -- linear layers

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        w, b = wb
        if len(x) <= self.few:
            grain = max(COLUMNS, WORTHWHILE // w.shape[1])
            self._pool.ranges(len(w), grain, linear.linear_few_rows, y, x, w, b)
        else:
            self.matmuls.forward(y, x, w, b)
        if onto is not None:
            self.add(y, y, onto)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        self.matmuls.backward(dx, dy, w)

    def linear_backward_weights(
        self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Array | None = None
    ) -> None:
        dw, db = dwb
        self.matmuls.backward_weights(dw, dy, x, accumulate)
        if db is not None:
            self._pool.ranges(dy.shape[1], COLUMNS, rowwise.sum_rows, db, dy, accumulate)

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        self.linear(pre, x, wb)
        forward = linear.FORWARD[act]
        self._pool.ranges(len(y), ROWS, forward, y, pre)

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """In place, as a loop over dpre and pre would not vectorize where they are one; y comes for free."""
        assert db is None
        self.linear_backward(y, dy, w)
        backward = linear.BACKWARD[act]
        self._pool.ranges(len(y), ROWS, backward, y, dpre)

    # -- attention

    def rope(
        self, qkv: Array, angles: Angles, n_head: int, seq_len: int, start: Array | None, inverse: bool
    ) -> None:
        cos, sin = (table[places(seq_len, start)] for table in angles)
        self._pool.ranges(len(qkv), ROWS, attention.rope, qkv, cos, sin, n_head, inverse)

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        n_head, n_seq = lse.shape[1], len(y) // seq_len
        size = y.shape[1] // n_head

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(heads.forward_scratch, seq_len, size, self.dtype.name, self.wide.name)
            attention.attention(i, j, y, lse, qkv, seq_len, scratch)

        def abreast_of(i: int, j: int) -> None:
            abreast.attention(i, j, y, lse, qkv, seq_len, self._memory.of(abreast.scratch, size))

        if self._split_freely and abreast.fits(n_seq // self.threads, seq_len, size, qkv.dtype):
            self._pool.ranges(n_seq, 1, abreast_of)
        else:
            self._pool.ranges(n_seq * n_head, 1, some)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, db: Bias = None
    ) -> None:
        assert db is None
        n_head = lse.shape[1]
        size = y.shape[1] // n_head

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(heads.backward_scratch, seq_len, size, self.dtype.name, self.wide.name)
            attention.attention_backward(i, j, dqkv, dy, y, lse, qkv, seq_len, scratch)

        self._pool.ranges(len(y) // seq_len * n_head, 1, some)

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: Array) -> None:
        first = int(start[0])
        _, n_seq, n_head, length, size = cache.shape

        def some(i: int, j: int) -> None:
            scratch = self._memory.of(heads.forward_scratch, length, size, self.dtype.name, self.wide.name)
            attention.attention_cached(i, j, y, cache, qkv, first, scratch)

        read = 2 * (first + len(y) // n_seq) * size
        self._pool.ranges(n_seq * n_head, max(1, WORTHWHILE // read), some)

    # -- head and loss

    def _unpadded(self, w: Array, vocab: int) -> Array:
        """The output layer, of which `linear` shall compute the scores of real tokens alone."""
        return w[:vocab]

    def linear_cross_entropy(
        self,
        losses: Array,
        dx: Array | None,
        dw: Array | None,
        x: Array,
        head: Head,
        targets: Array,
        scale: float,
        accumulate: bool,
    ) -> None:
        """Padding is left out altogether, of the scratch memory too."""
        vocab = head.vocab
        w, dw = self._unpadded(head.w, vocab), None if dw is None else dw[:vocab]
        packed = head.logits.reshape(-1)[: len(head.logits) * vocab].reshape(-1, vocab)
        for start in range(0, len(x), len(packed)):
            rows = slice(start, start + len(packed))
            chunk = packed[: len(x[rows])]
            self.linear(chunk, x[rows], Affine(w, None))
            of_rows = losses[rows], targets[rows], chunk, scale, dx is not None
            self._pool.ranges(len(chunk), ROWS, self.loss_loop, *of_rows)
            if dx is not None:
                self.linear_backward(dx[rows], chunk, w)
            if dw is not None:
                self.linear_backward_weights(Affine(dw, None), chunk, x[rows], accumulate or start > 0)

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        total[0] = scale * x.sum(dtype=np.float64) + (total[0] if accumulate else 0.0)

    # -- optimizer

    def sum_squares(self, total: Array, g: Array) -> None:
        pieces = np.empty(-(-len(g) // PIECE))  # alike for any number of threads
        self._pool.ranges(len(pieces), 1, optimizer.squares, pieces, g)
        total[0] = pieces.sum()

    def squares(self, pieces: Array, g: Array) -> None:
        self._pool.ranges(len(pieces), 1, optimizer.squares, pieces, g)

    def add_up(self, total: Array, pieces: Array) -> None:
        total[0] = pieces.sum()

    def adamw(self, state: AdamState, norm: Array, knobs: Array, constants: AdamConstants) -> None:
        step = of_step(norm, knobs)
        if step is not None:
            self._pool.ranges(len(state.p), 4096, optimizer.adamw, *state, step, tuple(constants))

    def subtract(self, y: Array, a: Array, b: Array) -> None:
        self._pool.ranges(len(y), 4096, optimizer.subtract, y, a, b)

    def nesterov(self, state: OuterState, scale: float, lr: float, momentum: float) -> None:
        self._pool.ranges(len(state.p), 4096, optimizer.nesterov, *state, (scale, lr, momentum))


def of_step(norm: Array, knobs: Array) -> tuple[float, ...] | None:
    """What the loops of AdamW want to know of a step, gradients clipped; None if they are not finite."""
    scale, clip, step_size, keep, root = (float(knob) for knob in knobs)
    length = scale * float(norm[0]) ** 0.5
    if not np.isfinite(length):
        return None
    if clip and length > clip:
        scale *= clip / length
    return scale, step_size, keep, root


def places(seq_len: int, start: Array | None) -> slice:
    """The rows of a table of positions that belong to the tokens of a pass."""
    first = 0 if start is None else int(start[0])
    return slice(first, first + seq_len)

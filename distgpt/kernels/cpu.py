"""The vocabulary on CPU cores: compiled loops and BLAS, each split over the crew of one thread pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgpt.kernels.api import Array, Runs
from distgpt.kernels.fused import activation, attention, blas, embedding, linear, loss, norm, optimizer, rope
from distgpt.kernels.pool import Pool

ROWS = 8  # rows are handed out in multiples of this
COLUMNS = 16  # and columns or flat elements in whole cache lines
FEW = 4  # up to so many rows a linear layer is bound by reading w
WORTHWHILE = 1 << 17  # numbers to read: below that, waking a worker takes longer than the work


class CpuKernels:
    """`threads` workers, the caller among them; BLAS runs inside them at one thread."""

    def __init__(self, dtype: str = "float32", threads: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.threads = threads
        self._pool = Pool(threads)
        self._scratch: dict[int, list[Array]] = {}
        blas.single_threaded()

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        return np.zeros(shape, self.dtype)

    def tokens(self, host: Any) -> Array:
        return np.ascontiguousarray(host, np.int32)

    def to_host(self, array: Array) -> Any:
        return array

    def put(self, array: Array, host: Any) -> None:
        if host is not array:
            array[...] = host

    def each(self, work: Callable[[int], None], count: int) -> None:
        self._pool.run(work, count)

    def share(self, work: Callable[[], None]) -> None:
        self._pool.share(work)

    def zero(self, x: Array) -> None:
        x[...] = 0

    def add(self, y: Array, a: Array, b: Array) -> None:
        np.add(a, b, out=y)

    # -- embedding

    def embed(self, x: Array, tokens: Array, wte: Array, wpe: Array | None) -> None:
        self._pool.ranges(len(x), ROWS, embedding.embed, x, tokens, wte, wpe)

    def embed_backward(self, dwte: Array, dwpe: Array | None, dx: Array, tokens: Array, seq_len: int) -> None:
        self._pool.ranges(
            dx.shape[1],
            COLUMNS,
            embedding.embed_backward,
            dwte,
            dwpe,
            dx,
            tokens,
            seq_len,
        )

    # -- norms

    def add_norm(
        self,
        y: Array,
        s: Array,
        mean: Array | None,
        rstd: Array,
        x: Array,
        r: Array | None,
        w: Array | None,
        b: Array | None,
        eps: float,
    ) -> None:
        self._pool.ranges(len(y), ROWS, norm.add_norm, y, s, mean, rstd, x, r, w, b, eps)

    def norm_backward(
        self,
        dx: Array,
        y: Array,
        dy: Array,
        dres: Array | None,
        s: Array,
        mean: Array | None,
        rstd: Array,
        w: Array | None,
        b: Array | None,
    ) -> None:
        self._pool.ranges(len(y), ROWS, norm.norm_backward, dx, y, dy, dres, s, mean, rstd, w, b)

    def norm_backward_weights(
        self,
        dw: Array,
        db: Array | None,
        dy: Array,
        s: Array,
        mean: Array | None,
        rstd: Array,
        accumulate: bool,
    ) -> None:
        self._pool.ranges(
            len(dw),
            COLUMNS,
            norm.norm_backward_weights,
            dw,
            db,
            dy,
            s,
            mean,
            rstd,
            accumulate,
        )

    # -- linear layers

    def linear(self, y: Array, x: Array, w: Array, b: Array | None) -> None:
        """Split along the longer side, so that the shorter one is packed by every worker."""
        if len(x) <= FEW:
            grain = max(COLUMNS, WORTHWHILE // w.shape[1])
            self._pool.ranges(len(w), grain, linear.linear_few_rows, y, x, w, b)
        elif len(x) < len(w):
            self._pool.ranges(len(w), COLUMNS, linear.linear_columns, y, x, w, b)
        else:
            self._pool.ranges(len(x), ROWS, linear.linear, y, x, w, b)

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        self._pool.ranges(len(dx), ROWS, linear.linear_backward, dx, dy, w)

    def linear_backward_weights(
        self, dw: Array, db: Array | None, dy: Array, x: Array, accumulate: bool
    ) -> None:
        self._pool.ranges(len(dw), COLUMNS, linear.linear_backward_weights, dw, db, dy, x, accumulate)

    def linear_act(self, y: Array, pre: Array, x: Array, w: Array, b: Array | None, act: str) -> None:
        self.linear(pre, x, w, b)
        forward = activation.FORWARD[act]
        self._pool.ranges(len(y), ROWS, forward, y, pre)

    def linear_backward_act(self, pre: Array, y: Array, dy: Array, w: Array, act: str) -> None:
        backward = activation.BACKWARD[act]

        def rows(i: int, j: int) -> None:
            linear.linear_backward(i, j, y, dy, w)
            backward(i, j, y, pre)

        self._pool.ranges(len(y), ROWS, rows)

    # -- attention

    def rope(self, qkv: Array, cos: Array, sin: Array, n_head: int, inverse: bool) -> None:
        self._pool.ranges(len(qkv), ROWS, rope.rope, qkv, cos, sin, n_head, inverse)

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        def heads(i: int, j: int) -> None:
            attention.attention(i, j, y, lse, qkv, seq_len, self._blocks(seq_len))

        self._pool.ranges(len(y) // seq_len * lse.shape[1], 1, heads)

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int
    ) -> None:
        def heads(i: int, j: int) -> None:
            attention.attention_backward(i, j, dqkv, dy, y, lse, qkv, seq_len, self._blocks(seq_len))

        self._pool.ranges(len(y) // seq_len * lse.shape[1], 1, heads)

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: int) -> None:
        def heads(i: int, j: int) -> None:
            attention.attention_cached(i, j, y, cache, qkv, start, self._blocks(cache.shape[3]))

        read = 2 * (start + len(y) // cache.shape[1]) * cache.shape[4]
        self._pool.ranges(cache.shape[1] * cache.shape[2], max(1, WORTHWHILE // read), heads)

    def _blocks(self, seq_len: int) -> Array:
        """This worker's scratch for attention, made once per sequence length."""
        if seq_len not in self._scratch:
            self._scratch[seq_len] = [self.zeros(2, attention.BLOCK, seq_len) for _ in range(self.threads)]
        return self._scratch[seq_len][self._pool.member]

    # -- head and loss

    def linear_cross_entropy(
        self,
        losses: Array,
        dx: Array | None,
        dw: Array | None,
        x: Array,
        w: Array,
        targets: Array,
        logits: Array,
        scale: float,
        accumulate: bool,
    ) -> None:
        for start in range(0, len(x), len(logits)):
            rows = slice(start, start + len(logits))
            chunk = logits[: len(x[rows])]
            self.linear(chunk, x[rows], w, None)
            self._pool.ranges(
                len(chunk), ROWS, loss.loss_and_slope, start, losses, dx, w, targets, chunk, scale
            )
            if dw is not None:
                self.linear_backward_weights(dw, None, chunk, x[rows], accumulate or start > 0)

    # -- optimizer

    def sum_squares(self, g: Array) -> float:
        sums = np.zeros(self.threads)

        def part(i: int, j: int) -> None:
            sums[self._pool.member] = optimizer.sum_squares(i, j, g)

        self._pool.ranges(len(g), 4096, part)
        return float(sums.sum())

    def adamw(
        self,
        p: Array,
        m: Array,
        v: Array,
        g: Array,
        runs: Runs,
        grad_scale: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        step: int,
    ) -> None:
        rate = lr / (1 - beta1**step)
        root = (1 - beta2**step) ** -0.5
        self._pool.ranges(
            len(p),
            4096,
            optimizer.adamw,
            p,
            m,
            v,
            g,
            runs,
            grad_scale,
            rate,
            1 - lr * decay,
            beta1,
            beta2,
            eps,
            root,
        )

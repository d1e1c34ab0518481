"""The vocabulary: every operation the model calls, with its shapes and its formula.

Outputs come first and are overwritten, unless `accumulate` is true or the text says otherwise. Nothing
allocates. The dtype is fixed when a backend is built.

N rows (B sequences of T tokens, one after the other), C channels, H heads, V words.
An argument that may be None stands for a part that the architecture does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Array = Any  # a numpy.ndarray or a cupy.ndarray of the backend's dtype

Runs = Any  # int64 (n, 3) on the host: start, stop, decayed or not, of the stretches of a flat buffer


class Kernels(Protocol):
    """One backend. See `reference.py` for what each operation means, line by line."""

    dtype: Any
    threads: int

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        """A new array of the backend's dtype. For construction time only."""

    def tokens(self, host: Any) -> Array:
        """Token ids (int32) where this backend can read them."""

    def to_host(self, array: Array) -> Any:
        """An array as numpy sees it: the same memory where that is the host's, else a copy."""

    def put(self, array: Array, host: Any) -> None:
        """array ← numbers of any float type from the host."""

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call work(0) … work(count - 1), at the same time where there are workers, and wait for all."""

    def share(self, work: Callable[[], None]) -> None:
        """Call work(), the operations in which do not read what others of them write."""

    def zero(self, x: Array) -> None:
        """x ← 0"""

    def add(self, y: Array, a: Array, b: Array) -> None:
        """y ← a + b, all (N, C)"""

    # -- embedding

    def embed(self, x: Array, tokens: Array, wte: Array, wpe: Array | None) -> None:
        """x[n] ← wte[tokens[n]] + wpe[n mod T]. x (N, C), tokens (N,), wte (V, C), wpe (T, C)"""

    def embed_backward(self, dwte: Array, dwpe: Array | None, dx: Array, tokens: Array, seq_len: int) -> None:
        """dwte[tokens[n]] += dx[n]; dwpe[n mod T] += dx[n]. Always accumulates."""

    # -- norms: layer norm where mean is an array, RMS norm where it is None

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
        """s ← x + r; y ← (s - mean) · rstd · w + b, row by row. Without r, s is x itself."""

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
        """dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← the output, again.

        RMS norm has no mean(g) term.
        """

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
        """dw ← Σ dy · x̂; db ← Σ dy, over rows."""

    # -- linear layers: w is (outputs, inputs)

    def linear(self, y: Array, x: Array, w: Array, b: Array | None) -> None:
        """y ← x wᵀ + b"""

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        """dx ← dy w"""

    def linear_backward_weights(
        self, dw: Array, db: Array | None, dy: Array, x: Array, accumulate: bool
    ) -> None:
        """dw ← dyᵀ x; db ← Σ dy"""

    def linear_act(self, y: Array, pre: Array, x: Array, w: Array, b: Array | None, act: str) -> None:
        """pre ← x wᵀ + b; y ← act(pre). For swiglu pre is (N, 2·hidden): silu(left) · right."""

    def linear_backward_act(self, pre: Array, y: Array, dy: Array, w: Array, act: str) -> None:
        """y ← act(pre), again; pre ← (dy w) · act'(pre), its own gradient. On the way y holds dy w."""

    # -- attention, causal: qkv holds q, k, v side by side, each H heads wide

    def rope(self, qkv: Array, cos: Array, sin: Array, n_head: int, inverse: bool) -> None:
        """Turn q and k of row n by position n mod T, in place.

        cos, sin (T, head/2); number i of a head is paired with number i + head/2.
        """

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        """y ← softmax(q kᵀ / √head, causal) v per head; lse (N, H) ← log of the softmax's denominator."""

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int
    ) -> None:
        """dqkv ← gradient of attention with respect to qkv."""

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: int) -> None:
        """Append k and v of the new rows to the cache at `start`, then attend to all of it so far.

        cache (2, B, H, T_max, head); qkv (B·new, 3C).
        """

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
        """losses[n] ← -log softmax(x wᵀ)[n, targets[n]]; dx, dw ← the gradients of scale · Σ losses.

        `logits` (chunk, V) is scratch: the rows go through it chunk by chunk. Without dx: the loss alone.
        """

    # -- optimizer, on flat buffers

    def sum_squares(self, g: Array) -> float:
        """Σ g²"""

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
        """One AdamW step in place on p, m, v, with the gradient grad_scale · g. Steps count from 1."""

"""The vocabulary: every operation the model calls, with its shapes and its formula.

Outputs come first and are overwritten, unless `accumulate` is true or the text says otherwise. Nothing
allocates, and nothing waits for results, so that a backend can record a sequence of operations and repeat it.

Numbers are kept in two types, fixed when a backend is built: `dtype` for activations and the parameters that
products read, `wide` for what is summed up over many of them: statistics, losses, gradients of parameters and
all that the optimizer keeps. They differ only where `dtype` is bfloat16.

N rows (B sequences of T tokens, one after the other), C channels, H heads, V words.
An argument that may be None stands for a part that the architecture does not have.
`start` is where in their context the tokens of a pass begin, an int32 array of one number; None means 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Array = Any  # a numpy.ndarray or a cupy.ndarray
Work = Callable[[], None]

# What `adamw` is told anew in every step, float64, in this order.
KNOBS = ("grad_scale", "clip", "rate", "keep", "root")


class Kernels(Protocol):
    """One backend. See `reference.py` for what each operation means, line by line."""

    dtype: Any
    wide: Any
    threads: int
    logits_bytes: int  # the loss sees the logits of this much at a time
    in_place: bool  # whether linear_backward_act wants dpre to be pre itself
    queued: bool  # whether calls return before their work is done
    norm_partials: int  # rows of what norm_backward leaves for norm_backward_weights

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        """A new array of `dtype`. For construction time only, like the two that follow."""

    def wide_zeros(self, *shape: int) -> Array:
        """A new array of `wide`."""

    def scalars(self, count: int) -> Array:
        """New numbers of float64, all 0."""

    def integers(self, host: Any, dtype: str = "int32") -> Array:
        """A new array of whole numbers from the host: token ids, offsets."""

    def to_host(self, array: Array) -> Any:
        """An array as numpy sees it: the same memory where that is the host's, else a copy. Waits for it."""

    def later(self, array: Array) -> Callable[[], Any]:
        """A copy on the host of what the array holds at this point; whoever calls the result waits for it."""

    def put(self, array: Array, host: Any) -> None:
        """array ← numbers from the host, of any float type where the array's is one."""

    def round(self, low: Array, wide: Array) -> None:
        """low ← wide, rounded from `wide` to `dtype`"""

    def record(self, work: Work) -> Work:
        """What to call instead of `work`, where it will be called often and always with the same arrays."""

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call work(0) … work(count - 1), at the same time where there are workers, and wait for all."""

    def share(self, work: Callable[[], None]) -> None:
        """Call work(), the operations in which do not read what others of them write."""

    def zero(self, x: Array) -> None:
        """x ← 0"""

    def add(self, y: Array, a: Array, b: Array) -> None:
        """y ← a + b, all (N, C)"""

    # -- embedding

    def embed(
        self, x: Array, tokens: Array, wte: Array, wpe: Array | None, seq_len: int, start: Array | None
    ) -> None:
        """x[n] ← wte[tokens[n]] + wpe[start + n mod T]. x (N, C), tokens (N,), wte (V, C), wpe (≥ T, C)"""

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
        y: Array | None,
        partial: Array | None,
        dy: Array,
        dres: Array | None,
        s: Array,
        mean: Array | None,
        rstd: Array,
        w: Array | None,
        b: Array | None,
    ) -> None:
        """dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← the output, again.

        RMS norm has no mean(g) term. partial (norm_partials, 2C) ← sums over some of the rows, if the backend
        takes them along here for norm_backward_weights.
        """

    def norm_backward_weights(
        self,
        dw: Array,
        db: Array | None,
        partial: Array | None,
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

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool
    ) -> None:
        """dpre ← (dy w) · act'(pre); y is scratch for dy w, and ends as act(pre) if that is wanted again.

        Where the backend works `in_place`, dpre is pre.
        """

    # -- attention, causal: qkv holds q, k, v side by side, each H heads wide

    def rope(
        self,
        qkv: Array,
        cos: Array,
        sin: Array,
        n_head: int,
        seq_len: int,
        start: Array | None,
        inverse: bool,
    ) -> None:
        """Turn q and k of row n by position start + n mod T, in place.

        cos, sin (≥ T, head/2) are wide; number i of a head is paired with number i + head/2.
        """

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        """y ← softmax(q kᵀ / √head, causal) v per head; lse ← log of the softmax's denominator.

        lse has N·H numbers, as (N, H), in an order that the backend is free to choose.
        """

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int
    ) -> None:
        """dqkv ← gradient of attention with respect to qkv."""

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: Array) -> None:
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
        vocab: int,
        scale: float,
        accumulate: bool,
    ) -> None:
        """losses[n] ← -log softmax(x wᵀ)[n, targets[n]]; dx, dw ← the gradients of scale · Σ losses.

        Rows of w from `vocab` on are padding: not predicted, without gradient. `logits` (chunk, rows of w)
        is scratch: the rows of x go through it chunk by chunk. Without dx: the loss alone.
        """

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        """total[0] ← scale · Σ x"""

    # -- optimizer, on flat buffers

    def sum_squares(self, total: Array, g: Array) -> None:
        """total[0] ← Σ g², in float64; g of either type"""

    def adamw(
        self,
        p: Array,
        low: Array | None,
        m: Array,
        v: Array,
        g: Array,
        runs: Array,
        norm: Array,
        knobs: Array,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> None:
        """One AdamW step in place on p, m, v; low ← p, rounded, where there is such a copy.

        With s = grad_scale, times clip / (grad_scale · √norm) where that is below 1 and clip is not 0:
        m ← β1 m + (1 - β1) s g; v ← β2 v + (1 - β2) s² g²; p ← keep · p - rate · m / (√v · root + eps).
        norm[0] is Σ g² over all ranks; where it is not finite, nothing happens. `runs`, int64 (n, 3): start,
        stop, decayed or not, of the stretches of the flat buffers: those not decayed have keep = 1.
        """

"""The vocabulary: every operation the model calls, with its shapes and its formula.

Outputs come first and are overwritten, unless `accumulate` is true or the text says otherwise. Nothing
allocates and nothing waits for results, so that a backend can record a sequence of operations and replay it.

Arrays have one of two types, fixed when a backend is built: `dtype` for activations and the parameters that
a matmul reads, `wide` for sums over many: statistics, losses, gradients of parameters, and what the optimizer
keeps. The two differ only where `dtype` is bfloat16.

B sequences of T tokens, N = B·T rows one after the other; C channels, H heads, V tokens in the vocabulary.
None stands for a part that the architecture does not have.
`start` (1,) int32 is the position in their context of the first token of a pass; None means 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

Array = Any  # a numpy.ndarray or a cupy.ndarray
Work = Callable[[], None]

PIECE = 4096  # elements that stay in a cache, and whose squares are summed in their own type

# The hyperparameters of `adamw` that change from step to step, float64, in this order.
KNOBS = ("grad_scale", "clip", "step_size", "keep", "root")


class Affine(NamedTuple):
    """y = x̂ · w + b of a norm, both (C,); y = x wᵀ + b of a linear layer, w (outputs, inputs), b (outputs,).

    Named `wb`; the gradients of both, of the wide type, `dwb`.
    """

    w: Array  # None: a norm without gain
    b: Array | None


class BiasGradient(NamedTuple):
    """Where a sum over rows goes, of the wide type: it is overwritten, or added to."""

    db: Array
    accumulate: bool


Bias = BiasGradient | None


class Stats(NamedTuple):
    """What a norm found in each row: x̂ = (s - mean) · rstd, both (N,) and wide. RMS norm has no mean."""

    mean: Array | None
    rstd: Array


class Angles(NamedTuple):
    """Rotary positions: cos and sin (≥ T, head/2), wide, of position times frequency."""

    cos: Array
    sin: Array


class Head(NamedTuple):
    """The output layer: w (padded V, C), scratch memory for logits (chunk, padded V), and V itself."""

    w: Array
    logits: Array
    vocab: int


class AdamState(NamedTuple):
    """Flat buffers: parameters, their rounded copy of `dtype` (where there is one), moments, gradients.

    `stretches`, int64 (n, 3): start, stop, decayed or not. Weight decay applies to those decayed alone.
    """

    p: Array
    low: Array | None
    m: Array
    v: Array
    g: Array
    stretches: Array


class OuterState(NamedTuple):
    """Flat buffers, all wide but `low`, the rounded copy of the parameters p where there is one.

    `common`: the parameters with which all ranks began a round; `change`: how far they have come since,
    summed over the ranks.
    """

    p: Array
    low: Array | None
    common: Array
    velocity: Array
    change: Array


class Wire(Protocol):
    """What an exchange of gradients computes with, in their memory; bfloat16 as its bits."""

    @property
    def piece(self) -> int:
        """Elements to exchange at once."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of any type."""

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        """out, bfloat16 ← one of the two neighbours of x, float32, the nearer one more likely.

        Which one depends on the key and on the element's place alone; x[0] has place `index`.
        """

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        """total ← Σ over rows of parts, in their order, or `by_twos`, which overwrites them. Rows may be
        longer, and of bfloat16."""

    def widen(self, out: Array, x: Array) -> None:
        """out ← x, bfloat16, which may be longer."""


class AdamConstants(NamedTuple):
    """The hyperparameters of AdamW that stay the same in a run."""

    beta1: float
    beta2: float
    eps: float


class Kernels(Protocol):
    """One backend. See `reference.py` for what each operation means, line by line."""

    dtype: Any
    wide: Any
    threads: int
    logits_bytes: int  # the most memory that the loss wants for logits
    in_place: bool  # whether linear_backward_act wants dpre to be pre itself
    queued: bool  # whether calls return before their work is done
    adds: bool  # whether `linear` adds a residual along the way, so that the next norm need not
    beside: bool  # whether what `share` was given may be under way until `join`
    wire: Wire | None  # where arrays are not the host's
    sums_biases: bool  # whether backward passes add up the gradients of biases that they are given
    norm_sums: int  # rows of partial sums that norm_backward leaves for gradients of parameters

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        """A new array of `dtype`. For construction time only, like the three that follow."""

    def wide_zeros(self, *shape: int) -> Array:
        """A new array of `wide`."""

    def scalars(self, count: int) -> Array:
        """A new array of float64, all 0."""

    def integers(self, host: Any, dtype: str = "int32") -> Array:
        """A new array of integers from the host: token ids, offsets."""

    def to_host(self, array: Array) -> Any:
        """An array as numpy sees it: the same memory where that is the host's, else a copy. Waits for it."""

    def later(self, array: Array) -> Callable[[], Any]:
        """A copy on the host of what the array holds now; calling the result waits for it."""

    def put(self, array: Array, host: Any) -> None:
        """array ← elements from the host, of any float type where the array's is one."""

    def round(self, low: Array, wide: Array) -> None:
        """low ← wide, rounded from `wide` to `dtype`"""

    def record(self, work: Work) -> Work:
        """What to call instead of `work`, where it will be called often and always with the same arrays."""

    def between(self, act: Work) -> None:
        """Call act() now, and in this place of the work that is recorded whenever that is repeated."""

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Choose what was chosen by timing as the first rank with the same device did.

        `gather` returns every rank's bytes. Collective; to be called once everything has run.
        """

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call work(0) … work(count - 1), at the same time where there are workers, and wait for all."""

    def share(self, work: Callable[[], None]) -> None:
        """Call work(), whose operations are independent of each other."""

    def join(self) -> None:
        """Let what follows wait for what `share` was given, where the backend does that `beside`."""

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

    # -- norms: layer norm, or RMS norm where stats.mean is None

    def add_norm(
        self, y: Array, s: Array, stats: Stats, x: Array, r: Array | None, wb: Affine, eps: float
    ) -> None:
        """s ← x + r; y ← (s - mean) · rstd · w + b, row by row. y, s, x, r (N, C). Without r, s is x itself.

        mean ← mean(s); rstd ← 1 / √(mean((s - mean)²) + eps)
        """

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
        """dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← the output, again.

        dx, y, dy, dres, s (N, C). RMS norm has no mean(g) term. sums (norm_sums, 3C), where the backend
        computes them along the way: each row holds Σ dy · x̂, Σ dy and Σ dx over some of the rows.
        """

    def norm_backward_weights(
        self, dwb: Affine, sums: Array | None, dy: Array, s: Array, stats: Stats, accumulate: bool
    ) -> None:
        """dw ← Σ dy · x̂; db ← Σ dy, over rows. dw, db (C,). sums: what norm_backward left."""

    # -- linear layers: w (outputs, inputs), x (N, inputs), y (N, outputs)

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        """y ← onto + x wᵀ + b"""

    def linear_backward(self, dx: Array, dy: Array, w: Array) -> None:
        """dx ← dy w"""

    def linear_backward_weights(
        self, dwb: Affine, dy: Array, x: Array, accumulate: bool, sums: Array | None = None
    ) -> None:
        """dw ← dyᵀ x; db ← Σ dy. sums: what norm_backward left when it computed dy."""

    def linear_act(self, y: Array, pre: Array, x: Array, wb: Affine, act: str) -> None:
        """pre ← x wᵀ + b; y ← act(pre). For swiglu pre is (N, 2·hidden): silu(left) · right."""

    def linear_backward_act(
        self, dpre: Array, y: Array, dy: Array, w: Array, pre: Array, act: str, again: bool, db: Bias = None
    ) -> None:
        """dpre ← (dy w) · act'(pre); y is scratch for dy w, and ends as act(pre) if `again`.

        Where the backend works `in_place`, dpre is pre. db ← Σ dpre over rows, rounded or not, where it
        `sums_biases`; elsewhere it is None.
        """

    # -- attention, causal: qkv (N, 3C) holds q, k, v side by side, each H heads wide

    def rope(
        self, qkv: Array, angles: Angles, n_head: int, seq_len: int, start: Array | None, inverse: bool
    ) -> None:
        """Rotate q and k of row n by the angles of position start + n mod T, in place.

        Element i of a head is paired with element i + head/2. `inverse`, the gradient, rotates back.
        """

    def attention(self, y: Array, lse: Array, qkv: Array, seq_len: int) -> None:
        """y ← softmax(q kᵀ / √head, causal) v per head, (N, C); lse ← log of the softmax's denominator.

        lse has N·H elements, as (N, H), in an order that the backend is free to choose.
        """

    def attention_backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, db: Bias = None
    ) -> None:
        """dqkv ← the gradient of attention with respect to qkv; db ← Σ dqkv, where the backend `sums_biases`.

        dv = pᵀ dy; ds = p · (dy vᵀ - rowsum(dy · y)) / √head; dq = ds k; dk = dsᵀ q
        """

    def attention_cached(self, y: Array, cache: Array, qkv: Array, start: Array) -> None:
        """Append k and v of the new rows to the cache at `start`, then attend to all of it so far.

        cache (2, B, H, T_max, head); qkv (B·new, 3C); y (B·new, C).
        """

    # -- head and loss

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
        """losses[n] ← -log softmax(x wᵀ)[n, targets[n]]; dx, dw ← the gradients of scale · Σ losses.

        With p the softmax: dlogits = scale · (p - onehot(targets)); dx = dlogits w; dw = dlogitsᵀ x.
        Rows of w from `vocab` on are padding: not predicted, without gradient. The rows of x go through
        head.logits chunk by chunk. Without dx: the loss alone.
        """

    def sum(self, total: Array, x: Array, scale: float, accumulate: bool) -> None:
        """total[0] ← scale · Σ x"""

    # -- optimizer, on flat buffers

    def sum_squares(self, total: Array, g: Array) -> None:
        """total[0] ← Σ g², in float64; g of either type"""

    def squares(self, pieces: Array, g: Array) -> None:
        """pieces[i] ← Σ g² of elements i · PIECE … (i + 1) · PIECE of g, as far as they go; float64"""

    def add_up(self, total: Array, pieces: Array) -> None:
        """total[0] ← Σ pieces, all float64; with `squares` what `sum_squares` finds, to the bit"""

    def adamw(self, state: AdamState, norm: Array, knobs: Array, constants: AdamConstants) -> None:
        """One AdamW step in place on p, m, v; low ← p, rounded.

        With s = grad_scale, times clip / (grad_scale · √norm) where that is below 1 and clip is not 0:
        m ← β1 m + (1 - β1) s g; v ← β2 v + (1 - β2) s² g²;
        p ← keep · p - step_size · m / (√v · root + eps), with keep = 1 where p is not decayed.
        norm[0] is Σ g² over all ranks; where it is not finite, nothing happens.
        """

    def subtract(self, y: Array, a: Array, b: Array) -> None:
        """y ← a - b, all wide"""

    def nesterov(self, state: OuterState, scale: float, lr: float, momentum: float) -> None:
        """One step along the ranks' mean change, with scale = 1 / ranks; p and common become the same.

        velocity ← momentum · velocity + scale · change;
        p, common ← common + lr · (momentum · velocity + scale · change); low ← p, rounded.
        """

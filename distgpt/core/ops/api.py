"""The vocabulary: every operation the model calls, with its shapes and its formula.

Outputs come first, but for `db`, and are overwritten, unless `accumulate` is true or the text says otherwise.
Operations allocate nothing and wait for nothing, so that a backend can record a sequence of them and replay
it. What makes arrays, or copies them to the host, comes first in `Kernels`. What Muon needs beside AdamW, and
what an exchange needs where arrays are not the host's, comes after them, at the end.

B sequences of T tokens, N = B·T rows one after the other; C channels, H heads, V tokens in the vocabulary.
None stands for a part that the architecture does not have.
`start` int32 is the position in their context of the first token of a pass: (1,) of all sequences, (B,) of
each; None means 0.
`positions` (N,) int32 is the position of each row in its document, where documents lie side by side in a
sequence and do not see each other; None means one document, n mod T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # commands import this file, and are to begin without NumPy
    import numpy as np

# An array of any type and rank. To a type checker it is NumPy's, for CuPy has no types and the same methods.
# A Protocol of what both have would be truer, but mypy does not come to an end over NumPy's overloads.
Array: TypeAlias = "np.ndarray"
HostArray: TypeAlias = "np.ndarray"  # NumPy's in fact
DType: TypeAlias = "str | np.dtype | type[np.generic]"

# Arrays by type and rank. A backend has two types, fixed when it is built, which differ only where the first
# is bfloat16. Floats are of `dtype`: activations, and parameters that a matmul reads.
Floats1d: TypeAlias = Array
Floats2d: TypeAlias = Array
Floats5d: TypeAlias = Array
# Wide ones are sums over many: statistics, losses, gradients of parameters, and what the optimizer keeps.
Wide1d: TypeAlias = Array
Wide2d: TypeAlias = Array
Doubles1d: TypeAlias = Array  # float64 on every backend
Doubles2d: TypeAlias = Array
Ints1d: TypeAlias = Array
Ints2d: TypeAlias = Array

Work = Callable[[], None]

QK_SCALE = 1.2  # length of an element of normalised queries and keys, so that attention can be sharper
IGNORED = -1  # the target of a row that is not learned: its loss and its gradients are 0
PIECE = 4096  # elements that stay in a cache, and whose squares are summed in their own type


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Ways in which backends differ, so that model and training can plan for them."""

    is_async: bool = False  # calls return before their work is done
    fuses_residual: bool = False  # `linear` adds a residual along the way, so that the next norm need not
    # `linear_backward_act` wants dpre to be pre itself: one array less to go through a cache.
    overwrites_pre: bool = False
    # `linear_backward_act` and `attention_backward` take a `db`, and write the sum over their rows there.
    # Only for backends whose training passes have one slice: the next one would overwrite that sum.
    sums_bias_gradients: bool = False
    rounded: str = ""  # the dtype that matrices are rounded to, for inference alone
    norm_sum_rows: int = 0  # rows of partial sums that `norm_backward` leaves for gradients of parameters


class StepScalars(NamedTuple):
    """The hyperparameters of `adamw` that change from step to step: a float64 array in this order.

    After these come (step_size, decay_factor) of each group of parameters.
    """

    grad_scale: float
    clip: float
    inv_sqrt_bias_correction: float


class Affine(NamedTuple):
    """y = x wᵀ + b of a linear layer, w (outputs, inputs), b (outputs,). Named `wb`.

    Also the gradients of w and b, of the wide type: `dwb`. Those of a norm are both (C,).
    """

    w: Array
    b: Floats1d | None


class Gain(NamedTuple):
    """y = x̂ · w + b of a norm, both (C,), either of which may be absent. Named `wb`.

    Kernels compute both gradients at once: these are an Affine, whose w is always there.
    """

    w: Floats1d | None
    b: Floats1d | None


class BiasGradient(NamedTuple):
    """The gradient of a bias, which a sum over rows overwrites or is added to."""

    db: Wide1d
    accumulate: bool


Bias = BiasGradient | None


class Stats(NamedTuple):
    """Statistics of each row, (N,), of a norm x̂ = (s - mean) · rstd. RMS norm has no mean."""

    mean: Wide1d | None
    rstd: Wide1d


class Angles(NamedTuple):
    """Rotary positions: cos and sin (≥ T, head/2) of position times frequency."""

    cos: Wide2d
    sin: Wide2d


class Head(NamedTuple):
    """The output layer: w (padded V, C), scratch memory for logits (chunk, padded V), and V itself."""

    w: Floats2d
    logits: Floats2d
    vocab: int


class AdamState(NamedTuple):
    """Flat buffers: parameters, their copy of low precision (where there is one), moments, gradients.

    `ranges`, int64 (n, 4), without gaps: start, stop, group, start in v. Group -1 is left as it is, and v
    may be shorter there.
    """

    p: Wide1d
    low: Floats1d | None
    m: Wide1d
    v: Wide1d
    g: Wide1d
    ranges: Ints2d


class SortedTokens(NamedTuple):
    """Tokens (N,) and their rows in the order of the tokens, where kernels need it to add up gradients."""

    tokens: Ints1d
    order: Ints1d | None


class NesterovState(NamedTuple):
    """Flat buffers: parameters p, their copy of low precision (where there is one), the momentum.

    `round_start`: the parameters with which all ranks began a round; `change`: how far they have come since,
    summed over the ranks.
    """

    p: Wide1d
    low: Floats1d | None
    round_start: Wide1d
    velocity: Wide1d
    change: Wide1d


class AdamConstants(NamedTuple):
    """The hyperparameters of AdamW that stay the same in a run."""

    beta1: float
    beta2: float
    eps: float


ALL_ROWS = 1 << 30  # `slice_rows` of kernels whose passes have one slice


class Kernels(Protocol):
    """One backend. See `reference.py` for what each operation means, line by line."""

    dtype: np.dtype  # of activations, and of the parameters that a matmul reads
    wide: np.dtype  # of sums, master weights and moments: float32, or float64 where `dtype` is
    threads: int
    logits_bytes: int  # the most memory that the loss wants for logits
    slice_rows: int  # the least of a slice where a worker has several: their results stay in a cache
    capabilities: Capabilities
    wire: Wire | None  # where arrays are not the host's

    # -- arrays and workers

    def zeros(self, *shape: int) -> Array:
        """A new array of `dtype`. For construction time only, like the three that follow."""

    def wide_zeros(self, *shape: int) -> Array:
        """A new array of `wide`."""

    def scalars(self, count: int) -> Array:
        """A new array of float64, all 0."""

    def integers(self, host: HostArray | Sequence[int], dtype: str = "int32") -> Array:
        """A new array of integers from the host: token ids, offsets."""

    def to_host(self, array: Array) -> HostArray:
        """Return an array as NumPy sees it: its own memory where that is the host's, else a copy. Waits."""

    def later(self, array: Array) -> Callable[[], HostArray]:
        """Start a copy to the host of the array as it is now; calling the result waits for it."""

    def put(self, array: Array, host: HostArray) -> None:
        """array ← elements from the host, of any float type where the array's is one."""

    def cast_down(self, low: Floats1d, wide: Wide1d) -> None:
        """low ← wide, rounded from `wide` to `dtype`"""

    def free_memory(self) -> int | None:
        """Return the bytes that are free on the device; None where arrays are the host's."""

    def record(self, work: Work) -> Work:
        """Return a faster `work`, for work that is called often and always with the same arrays."""

    def between(self, act: Work) -> None:
        """Call act() now, and again at this point of every replay of the recording."""

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Adopt the ways to compute each matmul that the first rank with the same device found the fastest.

        So ranks on like devices round alike. `gather` returns every rank's bytes. Collective; to be called
        once everything has run.
        """

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call work(0) … work(count - 1), at the same time where there are workers, and wait for all."""

    def run_together(self, work: Work) -> None:
        """Call work() on every worker at once; each operation in it is divided among them.

        Workers do not wait for each other in between, so no operation may read what another one writes, and
        work() may change nothing but by operations.
        """

    def zero(self, x: Array) -> None:
        """x ← 0"""

    def add(self, y: Floats2d, a: Floats2d, b: Floats2d) -> None:
        """y ← a + b, all (N, C)"""

    # -- embedding

    def embed(
        self,
        x: Floats2d,
        tokens: Ints1d,
        wte: Floats2d,
        wpe: Floats2d | None,
        seq_len: int,
        start: Ints1d | None,
        positions: Ints1d | None = None,
    ) -> None:
        """x[n] ← wte[tokens[n]] + wpe[start + n mod T]. x (N, C), tokens (N,), wte (V, C), wpe (≥ T, C)

        With `positions`, which have no `start`, wpe[positions[n]] is added.
        """

    def sort_tokens(self, tokens: Ints1d, vocab: int) -> SortedTokens:
        """Sort once for every `embed_backward` of these tokens, below `vocab`; valid until the next call."""

    def embed_backward(
        self,
        dwte: Wide2d,
        dwpe: Wide2d | None,
        dx: Floats2d,
        tokens: SortedTokens,
        seq_len: int,
        positions: Ints1d | None = None,
    ) -> None:
        """dwte[tokens[n]] += dx[n]; dwpe[n mod T] += dx[n], or dwpe[positions[n]]. Always accumulates.

        If dx has more columns than dwte, its last dwte.shape[1] columns are used.
        """

    def add_embedding(self, x: Floats2d, tokens: Ints1d, w: Floats2d) -> None:
        """The last columns of x[n] += w[tokens[n]]. x (N, ≥ C), tokens (N,), w (V, C)"""

    # -- norms: layer norm, or RMS norm where stats.mean is None

    def add_norm(
        self, y: Floats2d, s: Floats2d, stats: Stats, x: Floats2d, r: Floats2d | None, wb: Gain, eps: float
    ) -> None:
        """s ← x + r; y ← (s - mean) · rstd · w + b, row by row. y, s, x, r (N, C). Without r, s is x itself.

        mean ← mean(s); rstd ← 1 / √(mean((s - mean)²) + eps)
        """

    def norm_backward(
        self,
        dx: Floats2d,
        y: Floats2d | None,
        sums: Wide2d | None,
        dy: Floats2d,
        dres: Floats2d | None,
        s: Floats2d,
        stats: Stats,
        wb: Gain,
    ) -> None:
        """dx ← dres + rstd · (g - mean(g) - x̂ · mean(g · x̂)) with g = dy · w; y ← the output, again.

        dx, y, dy, dres, s (N, C). RMS norm has no mean(g) term. sums (norm_sum_rows, 3C): each row gets
        Σ dy · x̂, Σ dy and Σ dx over some of the rows.
        """

    def norm_backward_weights(
        self, dwb: Affine, sums: Wide2d | None, dy: Floats2d, s: Floats2d, stats: Stats, accumulate: bool
    ) -> None:
        """dw ← Σ dy · x̂; db ← Σ dy, over rows. dw, db (C,). sums: those of norm_backward."""

    # -- linear layers: w (outputs, inputs), x (N, inputs), y (N, outputs)

    def linear(self, y: Floats2d, x: Floats2d, wb: Affine, onto: Floats2d | None = None) -> None:
        """y ← onto + x wᵀ + b"""

    def linear_backward(self, dx: Floats2d, dy: Floats2d, w: Floats2d) -> None:
        """dx ← dy w. dy may be columns of a wider array."""

    def linear_backward_weights(
        self, dwb: Affine, dy: Floats2d, x: Floats2d, accumulate: bool, sums: Wide2d | None = None
    ) -> None:
        """dw ← dyᵀ x; db ← Σ dy. sums: those of the norm_backward that computed dy.

        dy may be columns of a wider array.
        """

    def add_low_rank(
        self, y: Floats2d, w: Floats2d, b: Floats2d | None, a: Floats2d | None, scale: float
    ) -> None:
        """y ← w + scale · b a, or w itself. y, w (outputs, inputs), b (outputs, rank), a (rank, inputs).

        In bfloat16 an element becomes one of its two neighbours, the nearer one more likely, always the same
        for the same sum: so little is added to w that rounding to the nearest would leave w as it was.
        """

    def linear_act(self, y: Floats2d, pre: Floats2d, x: Floats2d, wb: Affine, act: str) -> None:
        """pre ← x wᵀ + b; y ← act(pre). For swiglu pre is (N, 2·hidden): silu(left) · right."""

    def linear_backward_act(
        self,
        dpre: Floats2d,
        y: Floats2d,
        dy: Floats2d,
        w: Floats2d,
        pre: Floats2d,
        act: str,
        again: bool,
        db: Bias = None,
    ) -> None:
        """dpre ← (dy w) · act'(pre); y is scratch for dy w, and ends as act(pre) if `again`.

        dpre is pre where the backend `overwrites_pre`. db ← Σ dpre over rows, rounded or not, where it
        `sums_bias_gradients`; elsewhere it is None.
        """

    # -- attention, causal: qkv (N, (H + 2K)·head) holds q, k, v side by side, of H, K and K heads. K divides
    # H: each head of k and v meets H / K heads of q, the first the first ones, and so on.

    def rope(
        self, qkv: Floats2d, angles: Angles, heads: int, seq_len: int, start: Ints1d | None, inverse: bool
    ) -> None:
        """Rotate q and k of row n, H + K `heads`, by the angles of position start + n mod T, in place.

        Element i of a head is paired with element i + head/2. `inverse`, the gradient, rotates back.
        Documents side by side need no `positions`: q · k depends on the distance of two rows alone.
        """

    def qk_norm(self, qkv: Floats2d, rstd: Wide2d, head: int, eps: float) -> None:
        """Each head of q and k, x ← QK_SCALE · rstd · x, in place; rstd ← 1 / √(mean(x²) + eps), (N, H + K).

        `head`: elements of a head.
        """

    def qk_norm_backward(self, dqkv: Floats2d, qkv: Floats2d, rstd: Wide2d, head: int) -> None:
        """dx ← QK_SCALE · rstd · (dx - x̂ · mean(dx · x̂)) in each head of q and k; qkv has QK_SCALE · x̂."""

    def qk_norm_gain(self, qkv: Floats2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d, eps: float) -> None:
        """Each head of q and k, x ← gain · x̂, in place; x̂ ← rstd · x; rstd ← 1 / √(mean(x²) + eps).

        rstd (N, H + K); xhat (N, (H + K)·head); gain (2·head,), of the heads of q and of those of k.
        """

    def qk_norm_gain_backward(
        self, dqkv: Floats2d, dgain: Wide2d, xhat: Floats2d, rstd: Wide2d, gain: Floats1d
    ) -> None:
        """g ← gain · dx; dx ← rstd · (g - x̂ · mean(g · x̂)) in each head of q and k, in place.

        dgain (N, 2·head) ← Σ dx · x̂ over the heads of q of a row, and over those of k, of dx as it was.
        """

    def sum_rows(self, total: Wide1d, x: Wide2d | Floats2d, accumulate: bool) -> None:
        """total ← Σ x, over rows. x (N, C), total (C,)"""

    def attention(
        self,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        seq_len: int,
        positions: Ints1d | None = None,
        window: int = 0,
    ) -> None:
        """y ← softmax(q kᵀ / √head, causal) v per head, (N, H·head); lse ← log of the softmax's denominator.

        With `positions` a row sees its own document alone: itself and the positions[n] rows before it; with
        a `window` no more than that many rows, itself included. lse has N·H elements, as (N, H), in an order
        that the backend is free to choose.
        """

    def attention_backward(
        self,
        dqkv: Floats2d,
        dy: Floats2d,
        y: Floats2d,
        lse: Wide2d,
        qkv: Floats2d,
        seq_len: int,
        db: Bias = None,
        positions: Ints1d | None = None,
        window: int = 0,
    ) -> None:
        """dqkv ← the gradient with respect to qkv; db ← Σ dqkv, where the backend `sums_bias_gradients`.

        dv = Σ pᵀ dy; ds = p · (dy vᵀ - rowsum(dy · y)) / √head; dq = ds k; dk = Σ dsᵀ q.
        Σ is over the heads of q that meet a head of k and v.
        """

    def attention_cached(
        self,
        y: Floats2d,
        cache: Floats5d,
        qkv: Floats2d,
        start: Ints1d,
        window: int = 0,
        slots: Ints1d | None = None,
    ) -> None:
        """Append k and v of the new rows to the cache at `start`, then attend to all of it so far.

        With a `window` a row attends to the last so many of them, itself included.

        cache (2, L, K, T_max, head); qkv (B·new, (H + 2K)·head); y (B·new, H·head). `slots` (B,) int32: where
        in the cache each sequence is, two never in one; -1: it is none, nothing is stored of it, and y ← 0.
        None: L is B, and each is in its own.
        """

    # -- decoding beside the passes

    def move_cached(
        self, caches: Array, target: int, source: int, count: int, kept: int, angles: Angles | None
    ) -> None:
        """Slot `target`, positions 0 … kept ← slot `source`, those from `count` on, in all layers.

        caches (layers, 2, L, K, T_max, head). With `angles` keys are rotated back by `count` positions. The
        two slots may be one.
        """

    def likeliest(self, tokens: Ints2d, found: Wide2d, logits: Floats2d, vocab: int) -> None:
        """tokens (N, k) ← the k likeliest by logits (N, padded V), in order, equal logits by token.

        found (N, k + 1) ← their logits, and log Σ exp(logits), which is NaN where one is not finite.
        """

    def drawn(self, tokens: Ints1d, found: Doubles2d, logits: Floats2d, vocab: int, draws: Doubles2d) -> None:
        """tokens (N,) ← one drawn by logits (N, padded V) each; draws (N, 2): temperature, number of [0, 1).

        The first where the running sum of p = exp((logits - highest) / temperature) passes number · Σ p;
        found (N, 2) ← its logit, and Σ p. Only where rounding decides may backends differ. A row that is
        not finite gives any token.
        """

    # -- head and loss

    def linear_cross_entropy(
        self,
        losses: Wide1d,
        dx: Floats2d | None,
        dw: Wide2d | None,
        x: Floats2d,
        head: Head,
        targets: Ints1d,
        scale: float,
        accumulate: bool,
    ) -> None:
        """losses[n] ← -log softmax(x wᵀ)[n, targets[n]]; dx, dw ← the gradients of scale · Σ losses.

        losses[n] and dx[n] are 0 where the target is IGNORED.
        With p the softmax: dlogits = scale · (p - onehot(targets)); dx = dlogits w; dw = dlogitsᵀ x.
        Rows of w from `vocab` on are padding: not predicted, without gradient. The rows of x go through
        head.logits chunk by chunk. Without dx: the loss alone.
        """

    def sum(self, total: Wide1d, x: Wide1d, scale: float, accumulate: bool) -> None:
        """total[0] ← scale · Σ x"""

    # -- optimizer, on flat buffers

    def sum_squares(self, total: Doubles1d, g: Floats1d) -> None:
        """total[0] ← Σ g²; g of either type. The same bits as `squares` and then `add_up`."""

    def squares(self, pieces: Doubles1d, g: Floats1d) -> None:
        """pieces[i] ← Σ g² of elements i · PIECE … (i + 1) · PIECE of g, as far as they go.

        Ranks that have a part of g each compute some of the pieces.
        """

    def add_up(self, total: Doubles1d, pieces: Doubles1d) -> None:
        """total[0] ← Σ pieces"""

    def adamw(self, state: AdamState, norm: Doubles1d, scalars: Doubles1d, constants: AdamConstants) -> None:
        """One AdamW step in place on p, m, v; low ← p, rounded. `scalars`: StepScalars and what follows them.

        With s = grad_scale, times clip / (grad_scale · √norm) where that is below 1 and clip is not 0:
        m ← β1 m + (1 - β1) s g; v ← β2 v + (1 - β2) s² g²;
        p ← decay_factor · p - step_size · m / (√v · inv_sqrt_bias_correction + eps).
        norm[0] is Σ g² over all ranks; where it is not finite, nothing happens.
        """

    def muon_momentum(
        self, m: Sequence[Wide1d], g: Sequence[Wide1d], norm: Doubles1d, scalars: Doubles1d
    ) -> None:
        """Each m ← μ m + (1 - μ) s g; its g ← (1 - μ) s g + μ m, Nesterov's. `scalars`: MuonScalars.

        s is as in `adamw`; where norm[0] is not finite, nothing happens.
        """

    def orthogonalise(self, updates: Sequence[Wide2d]) -> None:
        """Each U S Vᵀ ← about U Vᵀ, in place: all singular values come near 1.

        x ← u / (1.02 ‖u‖); then x ← a x + b x xᵀ x + c (x xᵀ)² x for each (a, b, c) of POLAR.
        """

    def orthogonalise_bytes(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return the memory that is kept to orthogonalise matrices of these shapes."""

    def muon(self, matrices: Sequence[MuonMatrix], norm: Doubles1d, scalars: Doubles1d, beta2: float) -> None:
        """One step along orthogonalised updates, in place on p and v; low ← p, rounded. u is scratch.

        q ← the mean squares of the rows (or columns) of u; v ← β2 v + (1 - β2) q; u ← u / √v, row by row,
        then scaled to the norm it had. With lr = learning_rate · √max(1, rows / columns):
        p ← p - lr · (u + weight_decay · p where u · p ≥ 0). Where norm[0] is not finite, nothing happens.
        """

    def subtract(self, y: Wide1d, a: Wide1d, b: Wide1d) -> None:
        """y ← a - b"""

    def nesterov(self, state: NesterovState, scale: float, lr: float, momentum: float) -> None:
        """One step along the ranks' mean change, with scale = 1 / ranks; p and round_start become the same.

        velocity ← momentum · velocity + scale · change;
        p, round_start ← round_start + lr · (momentum · velocity + scale · change); low ← p, rounded.
        """


# -- Muon

# Five steps of Polar Express (arXiv 2505.16932), which bring singular values of 0.001 to 1 near 1. They were
# computed with a safety factor of 1.02, by which `orthogonalise` divides: above 1 the steps would diverge.
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
TINY = 1e-12  # added to norms, which may be 0


class MuonScalars(NamedTuple):
    """The hyperparameters of Muon that change from step to step: a float64 array in this order."""

    grad_scale: float
    clip: float
    momentum: float
    learning_rate: float
    weight_decay: float


class MuonMatrix(NamedTuple):
    """One matrix, (rows, columns): parameters, their copy of low precision (where there is one), the update.

    v: the mean square of the updates' rows (rows,), or of their columns where these are more than the rows.
    """

    p: Wide2d
    low: Floats2d | None
    v: Wide1d
    u: Wide2d


# -- exchanges


class Wire(Protocol):
    """Arithmetic of an exchange of gradients, in their memory; bfloat16 as its bits."""

    @property
    def piece(self) -> int:
        """Elements to exchange at once."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array of any type."""

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        """out, bfloat16 ← one of the two neighbours of x, float32, the nearer one more likely.

        The choice depends on the key and on the element's index alone; x[0] has `index`.
        """

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        """total ← Σ over rows of parts, in their order, or `by_twos`, which overwrites them. Rows may be
        longer, and of bfloat16."""

    def widen(self, out: Array, x: Array) -> None:
        """out ← x, bfloat16, which may be longer."""

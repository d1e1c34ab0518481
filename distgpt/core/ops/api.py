"""The types and constants of the operations, which kernels.py defines. Commands import this without NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # commands import this file, and are to begin without NumPy
    import numpy as np

# An array of any type and rank. To a type checker it is NumPy's, for CuPy has no types and the same methods.
# A Protocol of what both have would be truer, but mypy does not come to an end over NumPy's overloads.
Array: TypeAlias = "np.ndarray"
HostArray: TypeAlias = "np.ndarray"  # NumPy's in fact
DType: TypeAlias = "str | np.dtype | type[np.generic]"

# Arrays by type and rank: documentation, for to a type checker all are one type. A backend has two types,
# fixed when it is built, which differ only where the first is bfloat16. Floats are of `dtype`: activations,
# and parameters that a matmul reads.
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


class AttentionMask(NamedTuple):
    """The rows that each row attends to: itself and those before it in its sequence of `seq_len` rows.

    With `positions`, (N,), only those of its own document: the positions[n] rows before it. With a `window`,
    no more than that many rows, itself included.
    """

    seq_len: int
    positions: Ints1d | None = None
    window: int = 0


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

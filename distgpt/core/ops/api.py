"""Types and constants of the operations in kernels.py. Commands import this file without NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # commands import this file and must start without NumPy
    import numpy as np

# An array of any type and rank. CuPy has no types but the same methods, so type checkers see NumPy's. A
# Protocol of the common methods would be more accurate, but mypy does not terminate on NumPy's overloads.
Array: TypeAlias = "np.ndarray"
HostArray: TypeAlias = "np.ndarray"  # always NumPy's
DType: TypeAlias = "str | np.dtype | type[np.generic]"

# Arrays by type and rank, only for documentation; type checkers treat all as equal. A backend has two types,
# fixed at construction, which differ only if the first is bfloat16. Floats have `dtype`: activations, and
# parameters that a matmul reads.
Floats1d: TypeAlias = Array
Floats2d: TypeAlias = Array
Floats5d: TypeAlias = Array
# Wide arrays are sums of many terms: statistics, losses, gradients of parameters, and optimizer state.
Wide1d: TypeAlias = Array
Wide2d: TypeAlias = Array
Doubles1d: TypeAlias = Array  # float64 on every backend
Doubles2d: TypeAlias = Array
Ints1d: TypeAlias = Array
Ints2d: TypeAlias = Array

Work = Callable[[], None]

QK_SCALE = 1.2  # length of an element of normalized queries and keys, to allow sharper attention
IGNORE_INDEX = -1  # target of a row that is not trained, with loss and gradients 0
PIECE = 4096  # elements that stay in a cache, and whose squares are summed in their own type


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Differences between backends that the model and training must consider."""

    is_async: bool = False  # calls return before their work is done
    fuses_residual: bool = False  # `linear` also adds a residual, so the next norm does not
    # `linear_backward_act` requires dpre to be pre itself, so that one less array passes through a cache.
    overwrites_pre: bool = False
    # `linear_backward_act` and `attention_backward` write the sum over their rows to `db`. Only for backends
    # with one slice per training pass: the next slice would overwrite the sum.
    sums_bias_gradients: bool = False
    rounded: str = ""  # dtype that matrices are quantized to, only for inference
    norm_sum_rows: int = 0  # rows of partial sums that `norm_backward` writes for parameter gradients


class StepScalars(NamedTuple):
    """The hyperparameters of `adamw` that change with the step: a float64 array in this order.

    After these, the array has (step_size, decay_factor) of each group of parameters.
    """

    grad_scale: float
    clip: float
    inv_sqrt_bias_correction: float


class Affine(NamedTuple):
    """y = x wᵀ + b of a linear layer, with w (outputs, inputs) and b (outputs,). Named `wb`.

    Also the gradients of w and b in the wide type, named `dwb`. The gradients of a norm are both (C,).
    """

    w: Array
    b: Floats1d | None


class Gain(NamedTuple):
    """y = x̂ · w + b of a norm, both (C,), or None if absent. Named `wb`.

    Kernels compute both gradients together, as an Affine, whose w is always present.
    """

    w: Floats1d | None
    b: Floats1d | None


class BiasGradient(NamedTuple):
    """The gradient of a bias. If `accumulate`, a sum over rows is added; otherwise, it is overwritten."""

    db: Wide1d
    accumulate: bool


Bias = BiasGradient | None


class Stats(NamedTuple):
    """Statistics per row, (N,), of a norm x̂ = (s - mean) · rstd. RMS norm has no mean."""

    mean: Wide1d | None
    rstd: Wide1d


class Angles(NamedTuple):
    """Rotary positions: cos and sin (≥ T, head/2) of position times frequency."""

    cos: Wide2d
    sin: Wide2d


class Head(NamedTuple):
    """The output layer: w (padded V, C), scratch memory for logits (chunk, padded V), and V."""

    w: Floats2d
    logits: Floats2d
    vocab: int


class AttentionMask(NamedTuple):
    """The rows visible to each row: itself and the rows before it in its sequence of `seq_len` rows.

    With `positions` (N,), only the positions[n] previous rows of the same document. With a `window`, at most
    that many rows, itself included.
    """

    seq_len: int
    positions: Ints1d | None = None
    window: int = 0


class AdamState(NamedTuple):
    """Flat buffers: parameters, their low-precision copy (or None), moments, gradients.

    `ranges`, int64 (n, 4), without gaps: start, stop, group, start in v. Group -1 is not updated, and v may
    be shorter there.
    """

    p: Wide1d
    low: Floats1d | None
    m: Wide1d
    v: Wide1d
    g: Wide1d
    ranges: Ints2d


class SortedTokens(NamedTuple):
    """Tokens (N,), and their row numbers sorted by token if kernels need them to add gradients."""

    tokens: Ints1d
    order: Ints1d | None


class NesterovState(NamedTuple):
    """Flat buffers: parameters p, their low-precision copy (or None), and the momentum (`velocity`).

    `round_start`: the parameters of all ranks at the start of a round; `change`: their change since, summed
    over the ranks.
    """

    p: Wide1d
    low: Floats1d | None
    round_start: Wide1d
    velocity: Wide1d
    change: Wide1d


class AdamConstants(NamedTuple):
    """The hyperparameters of AdamW that are constant in a run."""

    beta1: float
    beta2: float
    eps: float


ALL_ROWS = 1 << 30  # `slice_rows` of kernels whose passes have one slice


# -- Muon

# Five steps of Polar Express (arXiv 2505.16932), which move singular values from 0.001 to 1 close to 1. They
# were computed with a safety factor of 1.02. `orthogonalise` divides by it because the steps diverge above 1.
POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
TINY = 1e-12  # added to norms, which may be 0


class MuonScalars(NamedTuple):
    """The hyperparameters of Muon that change with the step: a float64 array in this order."""

    grad_scale: float
    clip: float
    momentum: float
    learning_rate: float
    weight_decay: float


class MuonMatrix(NamedTuple):
    """A matrix (rows, columns): parameters, their low-precision copy (or None), second moments, the update.

    v is the mean square of the update's rows (rows,), or of its columns if it has more columns than rows.
    """

    p: Wide2d
    low: Floats2d | None
    v: Wide1d
    u: Wide2d


# -- exchanges


class Wire(Protocol):
    """Arithmetic of a gradient exchange, in the memory of the gradients. bfloat16 is stored as its bits."""

    @property
    def piece(self) -> int:
        """Elements to exchange at a time."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a zeroed array of any type."""

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        """out, bfloat16 ← x, float32, rounded stochastically to one of its two neighbors.

        The choice depends only on the key and the element's index; x[0] has `index`.
        """

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        """total ← Σ over rows of parts, in order, or pairwise if `by_twos`, which overwrites parts.

        Rows may be longer than total, and bfloat16.
        """

    def widen(self, out: Array, x: Array) -> None:
        """out ← x, bfloat16, which may be longer."""

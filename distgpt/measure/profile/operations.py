"""The operations of a step: the row of each in a profile, and its FLOPs.

Only FLOPs of matmuls count, like in `core/model/counts.py`, without padding and recomputation in the
backward pass. They are computed from the arguments of a call, by the names in `core/ops/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

from distgpt.core.model.counts import BACKWARD, attention_flops, matmul_flops
from distgpt.core.ops.kernels import Kernels

CROSS_ENTROPY, DATA, WORKERS = "Cross-entropy", "Data", "Waiting for other workers"
WAIT, TRANSFER = "Allreduce: waiting for ranks", "Allreduce: transfer"
BETWEEN, GPU_WAITS = "Between operations (Python)", "GPU waiting for Python"

# Rows for the rest of an operation if its matmuls were measured separately.
WITHOUT_MATMULS = {
    "linear_act": "Activation forward",
    "linear_backward_act": "Activation backward",
    "linear_cross_entropy": CROSS_ENTROPY,
}

# The rows of a profile, in table order, and their operations.
ROWS: dict[str, tuple[str, ...]] = {
    "Matmul forward": ("linear", "add_low_rank"),
    "Matmul backward into input": ("linear_backward",),
    "Matmul backward into weights": ("linear_backward_weights",),
    "Matmul with activation forward": ("linear_act",),
    "Matmul with activation backward": ("linear_backward_act",),
    "Attention forward": ("attention", "attention_cached"),
    "Attention backward": ("attention_backward",),
    "RoPE": ("rope",),
    "Norms forward": ("add", "add_norm", "qk_norm", "qk_norm_gain"),
    "Norms backward": (
        *("norm_backward", "norm_backward_weights", "qk_norm_backward", "qk_norm_gain_backward"),
        "sum_rows",
    ),
    "Activation forward": (),
    "Activation backward": (),
    "Embedding forward": ("embed", "previous_tokens", "add_embedding"),
    "Embedding backward": ("zero", "sort_tokens", "embed_backward"),
    "Head and cross-entropy": ("linear_cross_entropy",),
    CROSS_ENTROPY: ("sum",),
    "AdamW and gradient norm": (
        *("cast_down", "sum_squares", "squares", "add_up", "adamw", "subtract", "nesterov"),
    ),
    "Muon": ("muon_momentum", "orthogonalise", "muon"),
    # Measured like operations: fill, transfer and wait.
    WAIT: ("wait",),
    TRANSFER: ("transfer",),
    DATA: ("put", "move_cached", "topk_logits", "drawn", "fill"),
    WORKERS: (),
}
ORDER = tuple(ROWS)
ROW_OF = {name: row for row, names in ROWS.items() for name in names}
OPERATIONS = tuple(name for name in ROW_OF if name not in ("fill", "transfer", "wait"))
PARAMETERS = {name: list(signature(getattr(Kernels, name)).parameters)[1:] for name in OPERATIONS}


def _attention(a: Any) -> float:
    return attention_flops(a.y.size, a.mask.seq_len, a.mask.window)


def _head(a: Any) -> float:
    matmuls = 1 + (a.dx is not None) + (a.dw is not None)
    return matmuls * matmul_flops(len(a.x), a.head.vocab * a.x.shape[1])


def _orthogonalise(a: Any) -> float:
    """Count the matmuls of the backend that needs the fewest; a square counts half."""
    sides = (sorted(u.shape) for u in a.updates)
    return float(sum(low * low * min(15 * long + 5 * low, 3 * long + 17 * low) for low, long in sides))


FLOPS: dict[str, Callable[[Any], float]] = {
    "linear": lambda a: matmul_flops(len(a.x), a.wb.w.size),
    "linear_backward": lambda a: matmul_flops(len(a.dy), a.w.size),
    "linear_backward_weights": lambda a: matmul_flops(len(a.x), a.dwb.w.size),
    "add_low_rank": lambda a: 0.0 if a.b is None else matmul_flops(len(a.y), a.a.size),
    "linear_act": lambda a: matmul_flops(len(a.x), a.wb.w.size),
    "linear_backward_act": lambda a: matmul_flops(len(a.dy), a.w.size),
    "attention": _attention,
    "attention_backward": lambda a: BACKWARD * _attention(a),
    "linear_cross_entropy": _head,
    "orthogonalise": _orthogonalise,
}


def row_of(name: str, apart: bool) -> str:
    """Return an operation's row. `apart` means that its matmuls were measured separately."""
    return WITHOUT_MATMULS[name] if apart and name in WITHOUT_MATMULS else ROW_OF[name]


def flops_of(name: str, apart: bool, args: Sequence[Any], named: dict[str, Any]) -> float:
    """Return the matmul FLOPs of a call with these arguments."""
    if name not in FLOPS or (apart and name in WITHOUT_MATMULS):
        return 0.0
    return FLOPS[name](SimpleNamespace(**dict(zip(PARAMETERS[name], args, strict=False)), **named))

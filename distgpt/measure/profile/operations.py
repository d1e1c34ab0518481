"""The operations of a step: the line of each in a profile, the FLOPs it computes, the bytes it moves.

FLOPs are of matmuls, as `core/model/counts.py` counts them: padding, and what a backward pass computes
again, are left out. Bytes are those of every array read or written, once. Both are counted from the
arguments of a call, `a`, by the names that `core/ops/kernels.py` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

from distgpt.core.model.counts import BACKWARD, attention_flops, matmul_flops
from distgpt.core.ops.kernels import Kernels

FORWARD, INTO_INPUT = "Matmul forward", "Matmul backward into input"
INTO_WEIGHTS = "Matmul backward into weights"
CROSS_ENTROPY = "Cross-entropy"
WAIT, TRANSFER, DATA = "Allreduce: waiting for ranks", "Allreduce: transfer", "Data"
WORKERS = "Waiting for other workers"
BETWEEN, GPU_WAITS = "Between operations (Python)", "GPU waiting for Python"

# The matmuls of the output layer: inside `linear_cross_entropy`.
HEAD = {
    "linear": "Head: matmul forward",
    "linear_backward": "Head: matmul backward into input",
    "linear_backward_weights": "Head: matmul backward into weights",
}

# The lines of a profile, in the order of its table.
ORDER = (
    FORWARD,
    INTO_INPUT,
    INTO_WEIGHTS,
    "Matmul with activation forward",
    "Matmul with activation backward",
    "Attention forward",
    "Attention backward",
    "RoPE",
    "Norms forward",
    "Norms backward",
    "Activation forward",
    "Activation backward",
    "Embedding forward",
    "Embedding backward",
    *HEAD.values(),
    "Head and cross-entropy",
    CROSS_ENTROPY,
    "AdamW and gradient norm",
    "Muon",
    WAIT,
    TRANSFER,
    DATA,
    WORKERS,
)


class Cost(NamedTuple):
    """FLOPs of matmuls, and bytes."""

    flops: float = 0.0
    bytes: float = 0.0


def moved(*arrays: Any) -> float:
    """Return the bytes of arrays and of named tuples of arrays; what else is among them has none."""
    return float(sum(moved(*x) if isinstance(x, tuple) else getattr(x, "nbytes", 0) for x in arrays))


def _every_array(a: Any) -> float:
    return moved(*vars(a).values())


def _heads(a: Any, count: int, size: int) -> float:
    """Return the bytes of some heads in every row of qkv."""
    return float(len(a.qkv) * count * size * a.qkv.itemsize)


def _embed(a: Any) -> float:
    gathered = float(a.x.size * a.wte.itemsize)
    return moved(a.x, a.tokens) + gathered * (1 if a.wpe is None else 2)


def _embed_backward(a: Any) -> float:
    elements = a.dx.size + (0 if a.dwpe is None else a.seq_len * a.dx.shape[1])
    return moved(a.dx, a.tokens.tokens) + 2 * float(elements * a.dwte.itemsize)


def _cross_entropy(a: Any) -> float:
    """Count the logits as read, and their gradients as written in their place."""
    logits = float(len(a.x) * a.head.vocab * a.x.itemsize)
    return moved(a.losses, a.targets) + logits * (1 if a.dx is None else 2)


def _head_matmuls(a: Any) -> int:
    return 1 + (a.dx is not None) + (a.dw is not None)


def _attention(a: Any) -> float:
    return attention_flops(a.y.size, a.mask.seq_len, a.mask.window)


def _seen(a: Any) -> int:
    return int(a.window or a.cache.shape[3])


def _slots(a: Any) -> int:
    return int(a.cache.shape[1]) if a.slots is None else len(a.slots)


def _head(a: Any) -> float:
    (n, width), vocab = a.x.shape, a.head.vocab
    matmul = moved(a.x) + float((n + width) * vocab * a.x.itemsize)
    return _cross_entropy(a) + _head_matmuls(a) * matmul


def _adamw(a: Any) -> float:
    """Count parameters and moments as read and written."""
    p, low, m, v, g, _ = a.state
    return 2 * moved(p, m, v) + moved(g, low)


def _orthogonalise(a: Any) -> float:
    """Count the matmuls, of squares one half, as the backend does that needs the fewest."""
    sides = (sorted(u.shape) for u in a.updates)
    return float(sum(low * low * min(15 * long + 5 * low, 3 * long + 17 * low) for low, long in sides))


def _nothing(a: Any) -> float:
    return 0.0


class Operation(NamedTuple):
    """An operation's line in a profile, and functions that count a call's bytes and FLOPs."""

    row: str
    bytes: Callable[[Any], float] = _every_array
    flops: Callable[[Any], float] = _nothing


OPERATIONS = {
    "put": Operation(DATA, lambda a: moved(a.array)),
    "cast_down": Operation("AdamW and gradient norm"),
    "zero": Operation("Embedding backward"),
    "add": Operation("Norms forward"),
    "embed": Operation("Embedding forward", _embed),
    "add_embedding": Operation("Embedding forward", lambda a: moved(a.tokens) + 3 * len(a.x) * moved(a.w[0])),
    "sort_tokens": Operation("Embedding backward", lambda a: moved(a.tokens)),
    "embed_backward": Operation("Embedding backward", _embed_backward),
    "add_norm": Operation(
        "Norms forward", lambda a: moved(a.y, a.stats, a.x, a.r, a.wb) + (0 if a.r is None else moved(a.s))
    ),
    "norm_backward": Operation("Norms backward"),
    "norm_backward_weights": Operation("Norms backward"),
    "linear": Operation(FORWARD, flops=lambda a: matmul_flops(len(a.x), a.wb.w.size)),
    "linear_backward": Operation(INTO_INPUT, flops=lambda a: matmul_flops(len(a.dy), a.w.size)),
    "linear_backward_weights": Operation(INTO_WEIGHTS, flops=lambda a: matmul_flops(len(a.x), a.dwb.w.size)),
    "add_low_rank": Operation(
        FORWARD, flops=lambda a: 0.0 if a.b is None else matmul_flops(len(a.y), a.a.size)
    ),
    "linear_act": Operation(
        "Matmul with activation forward", flops=lambda a: matmul_flops(len(a.x), a.wb.w.size)
    ),
    "linear_backward_act": Operation(
        "Matmul with activation backward", flops=lambda a: matmul_flops(len(a.dy), a.w.size)
    ),
    # In place, of the heads of q and k.
    "qk_norm": Operation("Norms forward", lambda a: 2 * _heads(a, a.rstd.shape[1], a.head) + moved(a.rstd)),
    "qk_norm_backward": Operation(
        "Norms backward", lambda a: 3 * _heads(a, a.rstd.shape[1], a.head) + moved(a.rstd)
    ),
    "qk_norm_gain": Operation("Norms forward", lambda a: 3 * moved(a.xhat) + moved(a.rstd)),
    "qk_norm_gain_backward": Operation(
        "Norms backward", lambda a: 3 * moved(a.xhat) + moved(a.rstd, a.dgain)
    ),
    "sum_rows": Operation("Norms backward"),
    "rope": Operation("RoPE", lambda a: 2 * _heads(a, a.heads, 2 * a.angles.cos.shape[1])),
    "attention": Operation("Attention forward", flops=_attention),
    "attention_backward": Operation("Attention backward", flops=lambda a: BACKWARD * _attention(a)),
    # Of the whole cache, or a window of it: only the device knows how much of it is filled.
    "attention_cached": Operation(
        "Attention forward",
        lambda a: moved(a.y, a.qkv) + _slots(a) * moved(a.cache[:, :1]) * _seen(a) // a.cache.shape[3],
        lambda a: matmul_flops(len(a.y), 2 * _seen(a) * a.y.shape[1]),
    ),
    "move_cached": Operation(DATA, lambda a: 2 * moved(a.caches[:, :, :1]) * a.kept // a.caches.shape[4]),
    "likeliest": Operation(DATA),
    "drawn": Operation(DATA),
    "linear_cross_entropy": Operation(
        "Head and cross-entropy",
        _head,
        lambda a: _head_matmuls(a) * matmul_flops(len(a.x), a.head.vocab * a.x.shape[1]),
    ),
    "sum": Operation(CROSS_ENTROPY),
    "sum_squares": Operation("AdamW and gradient norm"),
    "squares": Operation("AdamW and gradient norm"),
    "add_up": Operation("AdamW and gradient norm"),
    "adamw": Operation("AdamW and gradient norm", _adamw),
    "muon_momentum": Operation("Muon", lambda a: 2 * moved(*a.m, *a.g)),
    "orthogonalise": Operation("Muon", lambda a: 2 * moved(*a.updates), _orthogonalise),
    "muon": Operation("Muon", lambda a: sum(2 * moved(m.p, m.v) + moved(m.u, m.low) for m in a.matrices)),
    "subtract": Operation("AdamW and gradient norm"),
    "nesterov": Operation("AdamW and gradient norm"),
}
# Measured like operations without being any.
OTHERS = {
    "fill": Operation(DATA),
    "transfer": Operation(TRANSFER),
    "wait": Operation(WAIT, _nothing),
}
# Operations whose matmuls were measured on their own: the rest of them.
WITHOUT_MATMULS = {
    "linear_act": Operation("Activation forward", lambda a: moved(a.y, a.pre)),
    "linear_backward_act": Operation("Activation backward", lambda a: moved(a.dpre, a.y, a.pre)),
    "linear_cross_entropy": Operation(CROSS_ENTROPY, _cross_entropy),
}

_PARAMETERS = {name: list(signature(getattr(Kernels, name)).parameters)[1:] for name in OPERATIONS}
_PARAMETERS |= {"fill": ["step", "rows", "x_out", "y_out"], "transfer": ["array"], "wait": ["array"]}


def line_of(name: str, inside: str | None, apart: bool) -> str:
    """Return an operation's line. `inside` names its caller; `apart`: its own matmuls were measured too."""
    if inside == "linear_cross_entropy" and name in HEAD:
        return HEAD[name]
    return _entry(name, apart).row


def cost_of(name: str, apart: bool, args: Sequence[Any], named: dict[str, Any]) -> Cost:
    """Return what a call with these arguments computes and moves."""
    a = SimpleNamespace(**dict(zip(_PARAMETERS[name], args, strict=False)), **named)
    entry = _entry(name, apart)
    return Cost(entry.flops(a), entry.bytes(a))


def _entry(name: str, apart: bool) -> Operation:
    if apart and name in WITHOUT_MATMULS:
        return WITHOUT_MATMULS[name]
    return OPERATIONS.get(name) or OTHERS[name]

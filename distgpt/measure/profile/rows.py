"""The lines of a profile: which one an operation belongs to, and in which order they come."""

from __future__ import annotations

FORWARD, INTO_INPUT, INTO_WEIGHTS = (
    "Matmul forward",
    "Matmul backward into input",
    "Matmul backward into weights",
)
CROSS_ENTROPY = "Cross-entropy"
WAIT, TRANSFER, DATA = "Allreduce: waiting for ranks", "Allreduce: transfer", "Data"
WORKERS = "Waiting for other workers"
BETWEEN, GPU_WAITS = "Between operations (Python)", "GPU waiting for Python"

ROW_OF = {
    "fill": DATA,
    "put": DATA,
    "embed": "Embedding forward",
    "embed_backward": "Embedding backward",
    "zero": "Embedding backward",
    "add_norm": "Norms forward",
    "add": "Norms forward",
    "norm_backward": "Norms backward",
    "norm_backward_weights": "Norms backward",
    "linear": FORWARD,
    "linear_backward": INTO_INPUT,
    "linear_backward_weights": INTO_WEIGHTS,
    "linear_act": "Matmul with activation forward",
    "linear_backward_act": "Matmul with activation backward",
    "rope": "RoPE",
    "attention": "Attention forward",
    "attention_backward": "Attention backward",
    "attention_cached": "Attention forward",
    "linear_cross_entropy": "Head and cross-entropy",
    "sum": CROSS_ENTROPY,
    "sum_squares": "AdamW and gradient norm",
    "adamw": "AdamW and gradient norm",
    "round": "AdamW and gradient norm",
    "wait": WAIT,
    "transfer": TRANSFER,
}
# Where the products in it are operations of their own, and were measured apart.
ALONE = {
    "linear_act": "Activation forward",
    "linear_backward_act": "Activation backward",
    "linear_cross_entropy": CROSS_ENTROPY,
}
# Products of the output layer: inside `linear_cross_entropy`.
HEAD = {
    "linear": "Head: matmul forward",
    "linear_backward": "Head: matmul backward into input",
    "linear_backward_weights": "Head: matmul backward into weights",
}

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
    WAIT,
    TRANSFER,
    DATA,
    WORKERS,
)


def row(operation: str, inside: str | None, apart: bool) -> str:
    """`inside` names the operation that called this one; `apart`: its own products were measured apart."""
    if inside == "linear_cross_entropy" and operation in HEAD:
        return HEAD[operation]
    return ALONE[operation] if apart and operation in ALONE else ROW_OF[operation]

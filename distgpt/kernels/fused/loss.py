"""Softmax cross-entropy of a chunk of rows, forward and backward in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.blas import PLAIN, TRANSPOSED, gemm
from distgpt.kernels.fused.jit import exp, jit


@jit
def head_loss(
    first: int,
    last: int,
    start: int,
    losses: Any,
    dx: Any,
    x: Any,
    w: Any,
    targets: Any,
    logits: Any,
    scale: float,
) -> None:
    """Rows first … last of the chunk that begins at `start`: logits, loss, dlogits in their place, dx."""
    words, width = w.shape
    rows = last - first
    low = start + first
    gemm(PLAIN, TRANSPOSED, rows, words, width, x[low:], width, w, width, 0.0, logits[first:], words)
    for i in range(rows):
        losses[low + i] = _cross_entropy(logits[first + i], targets[low + i], scale, dx is not None)
    if dx is not None:
        gemm(PLAIN, PLAIN, rows, width, words, logits[first:], words, w, width, 0.0, dx[low:], width)


@jit
def _cross_entropy(row: Any, target: int, scale: float, backward: bool) -> Any:
    """-log softmax(row)[target]; backward: row ← scale · (softmax(row) - onehot)."""
    real = row.dtype.type
    top = row[0]
    for j in range(row.shape[0]):
        top = max(top, row[j])
    hit = row[target]
    total = real(0)
    for j in range(row.shape[0]):
        e = exp(row[j] - top)
        row[j] = e
        total += e
    if backward:
        share = real(scale) / total
        for j in range(row.shape[0]):
            row[j] *= share
        row[target] -= real(scale)
    return top + np.log(total) - hit

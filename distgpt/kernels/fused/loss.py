"""Softmax cross-entropy of a chunk of rows, forward and backward in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.blas import PLAIN, gemm
from distgpt.kernels.fused.jit import exp, inline, jit, largest


@jit
def loss_and_slope(
    first: int,
    last: int,
    start: int,
    losses: Any,
    dx: Any,
    w: Any,
    targets: Any,
    logits: Any,
    scale: float,
) -> None:
    """Rows first … last of the chunk that begins at `start`: loss, dlogits in the logits' place, dx."""
    words, width = w.shape
    low, rows = start + first, last - first
    for i in range(rows):
        losses[low + i] = _cross_entropy(logits[first + i], targets[low + i], scale, dx is not None)
    if dx is not None:
        gemm(PLAIN, PLAIN, rows, width, words, logits[first:], words, w, width, 0.0, dx[low:], width)


@inline
def _cross_entropy(row: Any, target: int, scale: float, backward: bool) -> Any:
    """-log softmax(row)[target]; backward: row ← scale · (softmax(row) - onehot)."""
    real = row.dtype.type
    top = largest(row)
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

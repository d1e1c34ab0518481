"""Softmax cross-entropy of a chunk of rows, forward and backward in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.jit import exp, inline, jit, largest


@jit
def loss_and_slope(
    first: int, last: int, losses: Any, targets: Any, logits: Any, scale: float, backward: bool
) -> None:
    """Rows first … last of a chunk: the loss and, where it is wanted, dlogits in the logits' place."""
    for i in range(first, last):
        losses[i] = _cross_entropy(logits[i], targets[i], scale, backward)


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

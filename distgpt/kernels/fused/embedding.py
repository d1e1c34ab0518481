"""Token and position embedding, and their gradients."""

from __future__ import annotations

from typing import Any

from distgpt.kernels.fused.jit import jit


@jit
def embed(first: int, last: int, x: Any, tokens: Any, wte: Any, wpe: Any) -> None:
    """Rows first … last."""
    for i in range(first, last):
        xi, word = x[i], wte[tokens[i]]
        if wpe is None:
            for j in range(xi.shape[0]):
                xi[j] = word[j]
        else:
            place = wpe[i % wpe.shape[0]]
            for j in range(xi.shape[0]):
                xi[j] = word[j] + place[j]


@jit
def embed_backward(first: int, last: int, dwte: Any, dwpe: Any, dx: Any, tokens: Any, seq_len: int) -> None:
    """Columns first … last: every worker walks all rows in order, so sums do not depend on timing."""
    for i in range(dx.shape[0]):
        dxi, word = dx[i], dwte[tokens[i]]
        for j in range(first, last):
            word[j] += dxi[j]
        if dwpe is not None:
            place = dwpe[i % seq_len]
            for j in range(first, last):
                place[j] += dxi[j]

"""What is computed row by row: embedding, norms with the residual sum before them, cross-entropy.

A call computes rows first ≤ i < last, unless it says that these are columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.jit import exp, inline, jit, largest


@jit
def embed(first: int, last: int, x: Any, tokens: Any, wte: Any, wpe: Any) -> None:
    for i in range(first, last):
        xi, token_row = x[i], wte[tokens[i]]
        if wpe is None:
            for j in range(xi.shape[0]):
                xi[j] = token_row[j]
        else:
            position = wpe[i % wpe.shape[0]]
            for j in range(xi.shape[0]):
                xi[j] = token_row[j] + position[j]


@jit
def embed_backward(first: int, last: int, dwte: Any, dwpe: Any, dx: Any, tokens: Any, seq_len: int) -> None:
    """Columns first … last: every worker walks all rows in order, so sums do not depend on timing."""
    for i in range(dx.shape[0]):
        dxi, token_row = dx[i], dwte[tokens[i]]
        for j in range(first, last):
            token_row[j] += dxi[j]
        if dwpe is not None:
            position = dwpe[i % seq_len]
            for j in range(first, last):
                position[j] += dxi[j]


@jit
def add_norm(
    first: int, last: int, y: Any, s: Any, mean: Any, rstd: Any, x: Any, r: Any, w: Any, b: Any, eps: float
) -> None:
    width = s.shape[1]
    real = s.dtype.type
    share = real(1.0 / width)
    for i in range(first, last):
        si, yi = s[i], y[i]
        if r is not None:
            xi, ri = x[i], r[i]
            for j in range(width):
                si[j] = xi[j] + ri[j]
        mu = real(0)
        if mean is not None:
            for j in range(width):
                mu += si[j]
            mu *= share
            mean[i] = mu
        square = real(0)
        for j in range(width):
            square += (si[j] - mu) * (si[j] - mu)
        scale = real(1) / np.sqrt(square * share + real(eps))
        rstd[i] = scale
        for j in range(width):
            value = (si[j] - mu) * scale
            if w is not None:
                value *= w[j]
            if b is not None:
                value += b[j]
            yi[j] = value


@jit
def norm_backward(
    first: int, last: int, dx: Any, y: Any, dy: Any, dres: Any, s: Any, mean: Any, rstd: Any, w: Any, b: Any
) -> None:
    width = s.shape[1]
    real = s.dtype.type
    share = real(1.0 / width)
    for i in range(first, last):
        si, dyi, dxi = s[i], dy[i], dx[i]
        scale = rstd[i]
        mu = real(0)
        if mean is not None:
            mu = mean[i]
        along, total = real(0), real(0)
        for j in range(width):
            xhat = (si[j] - mu) * scale
            g = dyi[j]
            if w is not None:
                g *= w[j]
            along += g * xhat
            total += g
        if y is not None:
            yi = y[i]
            for j in range(width):
                value = (si[j] - mu) * scale
                if w is not None:
                    value *= w[j]
                if b is not None:
                    value += b[j]
                yi[j] = value
        along *= share
        total *= share
        if mean is None:
            total = real(0)
        for j in range(width):
            xhat = (si[j] - mu) * scale
            g = dyi[j]
            if w is not None:
                g *= w[j]
            gradient = scale * (g - total - xhat * along)
            if dres is not None:
                gradient += dres[i, j]
            dxi[j] = gradient


@jit
def norm_backward_weights(
    first: int, last: int, dw: Any, db: Any, dy: Any, s: Any, mean: Any, rstd: Any, accumulate: bool
) -> None:
    """Here first ≤ j < last are columns: every worker reads all rows and owns its part of dw."""
    real = s.dtype.type
    if not accumulate:
        dw[first:last] = real(0)
        if db is not None:
            db[first:last] = real(0)
    for i in range(s.shape[0]):
        si, dyi = s[i], dy[i]
        scale = rstd[i]
        mu = real(0)
        if mean is not None:
            mu = mean[i]
        for j in range(first, last):
            dw[j] += dyi[j] * (si[j] - mu) * scale
            if db is not None:
                db[j] += dyi[j]


@jit
def cross_entropy(
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

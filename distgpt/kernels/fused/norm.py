"""Layer norm and RMS norm, joined with the residual sum before them. Rows first ≤ i < last."""

from __future__ import annotations

from typing import Any

import numpy as np

from distgpt.kernels.fused.jit import jit


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
            slope = scale * (g - total - xhat * along)
            if dres is not None:
                slope += dres[i, j]
            dxi[j] = slope


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

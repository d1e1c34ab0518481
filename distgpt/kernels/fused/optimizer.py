"""AdamW, the outer step of several ranks, and the gradient's norm, on stretches of the flat buffers."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.api import PIECE
from distgpt.kernels.fused.jit import get, inline, jit, number
from distgpt.kernels.fused.rowwise import round_to


@jit
def squares(first, last, parts, g):
    """parts[i] ← Σ g² of piece number i, in the array's own precision; pieces first … last."""
    for i in range(first, last):
        piece = g[i * PIECE : min((i + 1) * PIECE, g.shape[0])]
        square = number(g, 0)
        for j in range(piece.shape[0]):
            square += get(piece, j) * get(piece, j)
        parts[i] = square


@jit
def adamw(first, last, p, low, m, v, g, stretches, step, constants):
    """Elements first … last of p, and of `low`, their rounded copy, where there is one."""
    if low is None:
        _update(first, last, p, m, v, g, stretches, step, constants)
        return
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        _update(start, stop, p, m, v, g, stretches, step, constants)
        round_to(low[start:stop], p[start:stop])


@inline
def _update(first, last, p, m, v, g, stretches, step, constants):
    """p ← keep · p - step_size · m / (√v · root + eps) with g · grad_scale for the gradient.

    `step` is (grad_scale, step_size, keep, root), `constants` (beta1, beta2, eps). step_size and root carry
    the bias corrections. `keep` is 1 - lr · weight_decay for the stretches that are decayed, and 1 elsewhere.
    """
    for i in range(stretches.shape[0]):
        start, stop = max(first, stretches[i, 0]), min(last, stretches[i, 1])
        if start < stop:
            kept = step[2] if stretches[i, 2] else 1.0
            pi, mi, vi, gi = p[start:stop], m[start:stop], v[start:stop], g[start:stop]
            _adamw(pi, mi, vi, gi, step[0], step[1], kept, step[3], constants[0], constants[1], constants[2])


@inline
def _adamw(p, m, v, g, grad_scale, step_size, keep, root, beta1, beta2, eps):
    real = p.dtype.type
    scale, step, keep, eps, root = real(grad_scale), real(step_size), real(keep), real(eps), real(root)
    b1, b2, c1, c2 = real(beta1), real(beta2), real(1 - beta1), real(1 - beta2)
    for i in range(p.shape[0]):
        gi = g[i] * scale
        mi = b1 * m[i] + c1 * gi
        vi = b2 * v[i] + c2 * gi * gi
        m[i] = mi
        v[i] = vi
        p[i] = keep * p[i] - step * mi / (np.sqrt(vi) * root + eps)


@jit
def subtract(first, last, y, a, b):
    """Elements first … last of y ← a - b."""
    yi, ai, bi = y[first:last], a[first:last], b[first:last]
    for i in range(yi.shape[0]):
        yi[i] = ai[i] - bi[i]


@jit
def nesterov(first, last, p, low, common, velocity, change, constants):
    """Elements first … last. `constants` is (scale, lr, momentum)."""
    for start in range(first, last, PIECE):
        stop = min(start + PIECE, last)
        _nesterov(p[start:stop], common[start:stop], velocity[start:stop], change[start:stop], constants)
        if low is not None:
            round_to(low[start:stop], p[start:stop])


@inline
def _nesterov(p, common, velocity, change, constants):
    real = p.dtype.type
    scale, lr, momentum = real(constants[0]), real(constants[1]), real(constants[2])
    for i in range(p.shape[0]):
        moved = scale * change[i]
        speed = momentum * velocity[i] + moved
        velocity[i] = speed
        common[i] += lr * (momentum * speed + moved)
        p[i] = common[i]

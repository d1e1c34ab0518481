"""The norm of a row, as all walks through the layers compute it."""

from __future__ import annotations

import numpy as np

from distgpt.kernels.fused.jit import inline


@inline
def norm_row(kind, norm, x, y):
    """y ← (x - mean) / std · gain + bias; RMS norm has no mean."""
    width, gain, bias = x.shape[0], norm[0], norm[1]
    share, mean, square = np.float32(1 / width), np.float32(0), np.float32(0)
    if kind.centred:
        for j in range(width):
            mean += x[j]
        mean *= share
    for j in range(width):
        square += (x[j] - mean) * (x[j] - mean)
    scale = np.float32(1) / np.sqrt(square * share + np.float32(kind.eps))
    for j in range(width):
        y[j] = (x[j] - mean) * scale * gain[j] + bias[j]

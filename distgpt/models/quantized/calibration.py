"""Rounding to int4 with a text at hand: what a weight's rounding changes, the weights behind it take back.

The text is read twice at once: by the model as it is, and by the one that is rounded so far. A matrix is
first moved to where it makes the exact outputs of the rounded model's inputs, as far as it can. Then GPTQ:
inputs x give H = Σ x xᵀ, and rounding w to q moves outputs by (w - q) H (w - q)ᵀ. Columns are rounded one
after the other, and those still to come move to where they make up for it best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.comm.serial import SerialComm
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.textfile import read_text
from distgpt.core.model.layers import activation_widths
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Affine, Array, Floats2d
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.core.saved.modelfile import load_model
from distgpt.inference.quantized.integers import BLOCKS, Quantised, nearest, restored
from distgpt.inference.quantized.rounding import rounded
from distgpt.models.quantized.bits import bits_of

TOKENS, LENGTH = 32768, 512  # of the text that is read, and of a sequence, at most
ROOM = 3 << 30  # bytes of what is computed of them: a large model reads fewer
DAMPING = 0.01  # of H's mean diagonal, added to it: inputs that hardly occurred


def calibrated(path: Path, text: Path) -> dict[str, Quantised]:
    """Return a model's matrices that int4 rounds, by name, rounded for what this text gives them to read."""
    kernels = _Rounding()
    model, about = load_model(path, kernels, SerialComm())
    length = min(LENGTH, model.config.seq_len)
    if about.tokenizer is None:
        raise DataError(f"{path} has no tokenizer, so it cannot read text")
    row = 4 * sum(activation_widths(model.config).values())
    most = min(TOKENS, max(length, ROOM // (2 * row)))
    tokens = about.tokenizer.encode(read_text(text))[:most]
    if len(tokens) < length:
        raise DataError(f"{text} has {len(tokens)} tokens: calibrate with {length} or more, best {most:,}")
    rows = len(tokens) // length
    names = [spec.name for spec in model.layout.specs if bits_of(spec, "int4") == 4]
    kernels.matrices = {name: model.params[name] for name in names}
    twice = np.tile(np.array(tokens[: rows * length]), 2)
    Pass(model, 2 * rows, length, training=False).forward(twice)
    return kernels.found


class _Rounding(CpuKernels):
    """Kernels that round a matrix, in place, as its inputs come: exact ones, then the rounded model's."""

    def __init__(self) -> None:
        super().__init__("float32", 1)  # so that all inputs come at once
        self.matrices: dict[str, Array] = {}  # those to round
        self.found: dict[str, Quantised] = {}

    def linear(self, y: Array, x: Array, wb: Affine, onto: Array | None = None) -> None:
        name = next((name for name, w in self.matrices.items() if w is wb.w), None)
        if name is None or name in self.found:
            super().linear(y, x, wb, onto)
            return
        half = len(x) // 2
        super().linear(y[:half], x[:half], wb, None if onto is None else onto[:half])
        self.found[name] = found = round_for(*moved(wb.w, x[:half], x[half:]))
        wb.w[...] = restored(found)
        super().linear(y[half:], x[half:], wb, None if onto is None else onto[half:])


def moved(w: Floats2d, exact: Floats2d, inputs: Floats2d) -> tuple[Floats2d, Floats2d]:
    """Return the matrix that makes of these inputs what w makes of exact ones, best, and the inputs' H."""
    h = inputs.T @ inputs
    damped, crossed = (part + _damping(h) * np.eye(len(h)) for part in (h, inputs.T @ exact))
    return (np.linalg.solve(damped, crossed) @ w.T).T.astype(np.float32), h


def round_for(w: Floats2d, products: Floats2d) -> Quantised:
    """Round a matrix (n, k) to int4, given the sum of the products of its inputs (k, k).

    The scales come first, for errors that count as much as others cannot make up for; then columns, those
    with the largest inputs first.
    """
    k = w.shape[1]
    h = products.astype(np.float64)
    h[np.diag_indices(k)] += _damping(h)
    costs = 1 / np.diag(np.linalg.inv(h))
    found = rounded(w, 4, 1, (costs / costs.max()).astype(np.float32))
    order = np.argsort(-np.diag(h), kind="stable")
    scales = np.repeat(from_bfloat16(found.scales), BLOCKS[4], axis=1)[:, order]
    upper = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T.astype(np.float32)
    left = np.ascontiguousarray(w[:, order])
    for first in range(0, k, BLOCKS[4]):
        last = min(first + BLOCKS[4], k)
        errors = np.empty((len(w), last - first), np.float32)
        for j in range(first, last):
            found.q[:, order[j]] = q = nearest(left[:, j], scales[:, j])
            errors[:, j - first] = (left[:, j] - q * scales[:, j]) / upper[j, j]
            left[:, j:last] -= np.outer(errors[:, j - first], upper[j, j:last])
        left[:, last:] -= errors @ upper[first:last, last:]
    return found


def _damping(h: Array) -> Any:
    return DAMPING * np.trace(h) / len(h) or 1.0

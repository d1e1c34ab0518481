"""Linear layers on BLAS. The bias is written into the output first, and the product added to it."""

from __future__ import annotations

from typing import Any

from distgpt.kernels.fused.blas import PLAIN, TRANSPOSED, gemm
from distgpt.kernels.fused.jit import jit


@jit
def linear(first: int, last: int, y: Any, x: Any, w: Any, b: Any) -> None:
    """Rows first … last of y ← x wᵀ + b."""
    outputs, inputs = w.shape
    beta = 0.0
    if b is not None:
        beta = 1.0
        for i in range(first, last):
            y[i, :] = b
    gemm(
        PLAIN,
        TRANSPOSED,
        last - first,
        outputs,
        inputs,
        x[first:],
        inputs,
        w,
        inputs,
        beta,
        y[first:],
        outputs,
    )


@jit
def linear_columns(first: int, last: int, y: Any, x: Any, w: Any, b: Any) -> None:
    """Columns first … last of y ← x wᵀ + b."""
    rows, inputs = x.shape
    outputs = w.shape[0]
    beta = 0.0
    if b is not None:
        beta = 1.0
        for i in range(rows):
            y[i, first:last] = b[first:last]
    gemm(
        PLAIN,
        TRANSPOSED,
        rows,
        last - first,
        inputs,
        x,
        inputs,
        w[first:],
        inputs,
        beta,
        y.reshape(-1)[first:],
        outputs,
    )


@jit
def linear_few_rows(first: int, last: int, y: Any, x: Any, w: Any, b: Any) -> None:
    """The same for so few rows that the time goes into reading w, which happens once."""
    inputs = w.shape[1]
    real = y.dtype.type
    for j in range(first, last):
        wj = w[j]
        for n in range(x.shape[0]):
            xn = x[n]
            total = real(0)
            for c in range(inputs):
                total += xn[c] * wj[c]
            if b is not None:
                total += b[j]
            y[n, j] = total


@jit
def linear_backward(first: int, last: int, dx: Any, dy: Any, w: Any) -> None:
    """Rows first … last of dx ← dy w."""
    outputs, inputs = w.shape
    gemm(
        PLAIN,
        PLAIN,
        last - first,
        inputs,
        outputs,
        dy[first:],
        dy.shape[1],
        w,
        inputs,
        0.0,
        dx[first:],
        inputs,
    )


@jit
def linear_backward_weights(
    first: int, last: int, dw: Any, db: Any, dy: Any, x: Any, accumulate: bool
) -> None:
    """Output rows first … last of dw ← dyᵀ x and db ← Σ dy."""
    rows, inputs = x.shape
    width = dy.shape[1]
    beta = 1.0 if accumulate else 0.0
    # dy's columns from `first` on: the same memory, seen from a later start.
    shifted = dy.reshape(-1)[first:]
    gemm(TRANSPOSED, PLAIN, last - first, inputs, rows, shifted, width, x, inputs, beta, dw[first:], inputs)
    if db is not None:
        if not accumulate:
            db[first:last] = dy.dtype.type(0)
        for i in range(rows):
            dyi = dy[i]
            for j in range(first, last):
                db[j] += dyi[j]

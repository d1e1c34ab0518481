"""Linear layers on BLAS, and the activations behind them: GELU (tanh form), ReLU and SwiGLU.

The bias is written into the output first, and the matmul added to it.
"""

from __future__ import annotations

import math

from distgpt.kernels.fused.blas import PLAIN, TRANSPOSED, gemm
from distgpt.kernels.fused.jit import exp, get, inline, jit, number, put

# gelu(x) = x · σ(u) with u = 2√(2/π) (x + 0.044715 x³): the tanh form, written with one exponential.
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715


@jit
def linear(first, last, y, x, w, b):
    """Rows first … last of y ← x wᵀ + b."""
    outputs, inputs = w.shape
    beta = 0.0
    if b is not None:
        beta = 1.0
        _repeat(y[first:last], b)
    n = last - first
    gemm(PLAIN, TRANSPOSED, n, outputs, inputs, x[first:], inputs, w, inputs, beta, y[first:], outputs)


@inline
def _repeat(y, b):
    """Every row of y ← b."""
    for i in range(y.shape[0]):
        row = y[i]
        for j in range(b.shape[0]):
            row[j] = b[j]


@jit
def linear_columns(first, last, y, x, w, b):
    """Columns first … last of y ← x wᵀ + b."""
    rows, inputs = x.shape
    outputs = w.shape[0]
    beta = 0.0
    if b is not None:
        beta = 1.0
        _repeat(y[:, first:last], b[first:last])
    n, columns = last - first, y.reshape(-1)[first:]
    gemm(PLAIN, TRANSPOSED, rows, n, inputs, x, inputs, w[first:], inputs, beta, columns, outputs)


@jit
def linear_few_rows(first, last, y, x, w, b):
    """Columns first … last of y ← x wᵀ + b for a few rows, where reading w, once, takes the time."""
    inputs = w.shape[1]
    for j in range(first, last):
        wj = w[j]
        for n in range(x.shape[0]):
            xn = x[n]
            total = number(y, 0)
            for c in range(inputs):
                total += get(xn, c) * get(wj, c)
            if b is not None:
                total += get(b, j)
            put(y[n], j, total)


@jit
def linear_backward(first, last, dx, dy, w):
    """Rows first … last of dx ← dy w."""
    outputs, inputs = w.shape
    n, width = last - first, dy.shape[1]
    gemm(PLAIN, PLAIN, n, inputs, outputs, dy[first:], width, w, inputs, 0.0, dx[first:], inputs)


@jit
def linear_backward_weights(first, last, dw, dy, x, accumulate):
    """Output rows first … last of dw ← [dw +] dyᵀ x."""
    rows, inputs = x.shape
    width = dy.shape[1]
    beta = 1.0 if accumulate else 0.0
    # dy's columns from `first` on: the same memory, seen from a later start.
    shifted = dy.reshape(-1)[first:]
    gemm(TRANSPOSED, PLAIN, last - first, inputs, rows, shifted, width, x, inputs, beta, dw[first:], inputs)


@inline
def gelu_of(x, one, linear, cubic):
    return x / (one + exp(-x * (linear + cubic * x * x)))


@inline
def silu_of(x, one):
    return x / (one + exp(-x))


@jit
def gelu(first, last, y, pre):
    for i in range(first, last):
        gelu_row(y[i], pre[i])


@inline
def gelu_row(y, pre):
    one, linear, cubic = number(y, 1), number(y, LINEAR), number(y, CUBIC)
    for j in range(pre.shape[0]):
        value = gelu_of(get(pre, j), one, linear, cubic)
        put(y, j, value)


@jit
def gelu_backward(first, last, y, pre):
    """Work in place: y holds dy and gets the output, pre holds the input and gets its gradient."""
    one, linear = number(y, 1), number(y, LINEAR)
    cubic, cubic3 = number(y, CUBIC), number(y, 3 * CUBIC)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = get(pi, j)
            sigmoid = one / (one + exp(-x * (linear + cubic * x * x)))
            value = x * sigmoid
            gradient = sigmoid + value * (one - sigmoid) * (linear + cubic3 * x * x)
            put(pi, j, get(yi, j) * gradient)
            put(yi, j, value)


@jit
def relu(first, last, y, pre):
    for i in range(first, last):
        relu_row(y[i], pre[i])


@inline
def relu_row(y, pre):
    zero = number(y, 0)
    for j in range(pre.shape[0]):
        x = get(pre, j)
        value = zero if x < zero else x  # written this way, NaN stays NaN
        put(y, j, value)


@jit
def relu_backward(first, last, y, pre):
    """Work in place: y holds dy and gets the output, pre holds the input and gets its gradient."""
    zero = number(y, 0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = get(pi, j)
            dy, value = get(yi, j), zero if x < zero else x
            gradient = dy if x > zero else zero
            put(pi, j, gradient)
            put(yi, j, value)


@jit
def swiglu(first, last, y, pre):
    width = y.shape[1]
    for i in range(first, last):
        swiglu_row(y[i], pre[i, :width], pre[i, width:])


@inline
def swiglu_row(y, left, right):
    one = number(y, 1)
    for j in range(y.shape[0]):
        value = silu_of(get(left, j), one) * get(right, j)
        put(y, j, value)


@jit
def swiglu_backward(first, last, y, pre):
    """Work in place: y holds dy and gets the output, pre holds the input and gets its gradient."""
    one = number(y, 1)
    width = y.shape[1]
    for i in range(first, last):
        yi, left, right = y[i], pre[i, :width], pre[i, width:]
        for j in range(width):
            x = get(left, j)
            sigmoid = one / (one + exp(-x))
            silu = x * sigmoid
            dy, r = get(yi, j), get(right, j)
            put(yi, j, silu * r)
            put(left, j, dy * r * (sigmoid + silu * (one - sigmoid)))
            put(right, j, dy * silu)


FORWARD = {"gelu": gelu, "relu": relu, "swiglu": swiglu}
BACKWARD = {"gelu": gelu_backward, "relu": relu_backward, "swiglu": swiglu_backward}

"""GELU (tanh form), ReLU and SwiGLU on rows first … last; the backward passes give the output again."""

from __future__ import annotations

import math
from typing import Any

from distgpt.kernels.fused.jit import exp, jit

# gelu(x) = x · σ(u) with u = 2√(2/π) (x + 0.044715 x³): the tanh form, written with one exponential.
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715


@jit
def gelu(first: int, last: int, y: Any, pre: Any) -> None:
    real = y.dtype.type
    one, linear, cubic = real(1), real(_LINEAR), real(_CUBIC)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = pi[j]
            yi[j] = x / (one + exp(-x * (linear + cubic * x * x)))


@jit
def gelu_backward(first: int, last: int, y: Any, pre: Any) -> None:
    """y goes from the output's gradient to the output, pre from the input to its gradient."""
    real = y.dtype.type
    one, linear, cubic, slope = real(1), real(_LINEAR), real(_CUBIC), real(3 * _CUBIC)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = pi[j]
            sigmoid = one / (one + exp(-x * (linear + cubic * x * x)))
            value = x * sigmoid
            pi[j] = yi[j] * (sigmoid + value * (one - sigmoid) * (linear + slope * x * x))
            yi[j] = value


@jit
def relu(first: int, last: int, y: Any, pre: Any) -> None:
    zero = y.dtype.type(0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = pi[j]
            yi[j] = zero if x < zero else x  # this way round not-a-number stays


@jit
def relu_backward(first: int, last: int, y: Any, pre: Any) -> None:
    """y goes from the output's gradient to the output, pre from the input to its gradient."""
    zero = y.dtype.type(0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = pi[j]
            pi[j] = yi[j] if x > zero else zero
            yi[j] = zero if x < zero else x


@jit
def swiglu(first: int, last: int, y: Any, pre: Any) -> None:
    one = y.dtype.type(1)
    width = y.shape[1]
    for i in range(first, last):
        yi, left, right = y[i], pre[i, :width], pre[i, width:]
        for j in range(width):
            yi[j] = left[j] / (one + exp(-left[j])) * right[j]


@jit
def swiglu_backward(first: int, last: int, y: Any, pre: Any) -> None:
    """y goes from the output's gradient to the output, pre from the input to its gradient."""
    one = y.dtype.type(1)
    width = y.shape[1]
    for i in range(first, last):
        yi, left, right = y[i], pre[i, :width], pre[i, width:]
        for j in range(width):
            sigmoid = one / (one + exp(-left[j]))
            silu = left[j] * sigmoid
            dy, r = yi[j], right[j]
            yi[j] = silu * r
            left[j] = dy * r * (sigmoid + silu * (one - sigmoid))
            right[j] = dy * silu


FORWARD = {"gelu": gelu, "relu": relu, "swiglu": swiglu}
BACKWARD = {"gelu": gelu_backward, "relu": relu_backward, "swiglu": swiglu_backward}

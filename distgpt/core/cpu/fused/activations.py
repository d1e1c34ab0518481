"""Activations and their derivatives: GELU (tanh form), ReLU, squared ReLU and SwiGLU.

Training uses a forward and a backward loop for each. Decoding uses a branch of `activate_in_place`.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from distgpt.core.cpu.compiling.jit import Loop, exp, get, inline, jit, number, put
from distgpt.core.ops.activations import ACTIVATIONS

# gelu(x) = x · σ(u) with u = 2√(2/π) (x + 0.044715 x³): the tanh form with a single exponential.
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715


@inline
def gelu_of(x, one, linear, cubic):
    return x / (one + exp(-x * (linear + cubic * x * x)))


@inline
def silu_of(x, one):
    return x / (one + exp(-x))


@jit
def gelu(first, last, y, pre):
    one = number(y, 1)
    linear = number(y, LINEAR)
    cubic = number(y, CUBIC)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            put(yi, j, gelu_of(get(pi, j), one, linear, cubic))


@jit
def gelu_backward(first, last, y, pre):
    """In place: y holds dy and receives the output; pre holds the input and receives its gradient."""
    one = number(y, 1)
    linear = number(y, LINEAR)
    cubic = number(y, CUBIC)
    cubic3 = number(y, 3 * CUBIC)
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
    zero = number(y, 0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = get(pi, j)
            put(yi, j, zero if x < zero else x)  # keeps NaN


@jit
def relu_backward(first, last, y, pre):
    """In place: y holds dy and receives the output; pre holds the input and receives its gradient."""
    zero = number(y, 0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x = get(pi, j)
            dy = get(yi, j)
            value = zero if x < zero else x
            gradient = dy if x > zero else zero
            put(pi, j, gradient)
            put(yi, j, value)


@inline
def relu2_of(x, zero):
    positive = zero if x < zero else x
    return positive * positive


@jit
def relu2(first, last, y, pre):
    zero = number(y, 0)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            put(yi, j, relu2_of(get(pi, j), zero))


@jit
def relu2_backward(first, last, y, pre):
    """In place: y holds dy and receives the output; pre holds the input and receives its gradient."""
    zero, two = number(y, 0), number(y, 2)
    for i in range(first, last):
        yi, pi = y[i], pre[i]
        for j in range(pi.shape[0]):
            x, dy = get(pi, j), get(yi, j)
            positive = zero if x < zero else x
            put(pi, j, two * positive * dy)
            put(yi, j, positive * positive)


@jit
def swiglu(first, last, y, pre):
    one = number(y, 1)
    width = y.shape[1]
    for i in range(first, last):
        yi, left, right = y[i], pre[i, :width], pre[i, width:]
        for j in range(width):
            put(yi, j, silu_of(get(left, j), one) * get(right, j))


@jit
def swiglu_backward(first, last, y, pre):
    """In place: y holds dy and receives the output; pre holds the input and receives its gradient."""
    one = number(y, 1)
    width = y.shape[1]
    for i in range(first, last):
        yi = y[i]
        left = pre[i, :width]
        right = pre[i, width:]
        for j in range(width):
            x = get(left, j)
            sigmoid = one / (one + exp(-x))
            silu = x * sigmoid
            dy, r = get(yi, j), get(right, j)
            put(yi, j, silu * r)
            put(left, j, dy * r * (sigmoid + silu * (one - sigmoid)))
            put(right, j, dy * silu)


# Numbers of the activations in the compiled decoder
NUMBERS = {"gelu": 0, "relu": 1, "swiglu": 2, "relu2": 3}


@inline
def activate_in_place(act, x, gate, count):
    """x ← act(x) for `count` float32 elements. If the activation is gated, `gate` is the other half.

    The loops above would stay scalar here because both arguments would be the same array.
    """
    zero, one = np.float32(0), np.float32(1)
    if act == 0:
        linear, cubic = np.float32(LINEAR), np.float32(CUBIC)
        for j in range(count):
            x[j] = gelu_of(x[j], one, linear, cubic)
    elif act == 1:
        for j in range(count):
            x[j] = zero if x[j] < zero else x[j]
    elif act == 3:
        for j in range(count):
            x[j] = relu2_of(x[j], zero)
    else:
        for j in range(count):
            x[j] = silu_of(x[j], one) * gate[j]


LOOPS = {
    "gelu": (gelu, gelu_backward),
    "relu": (relu, relu_backward),
    "relu2": (relu2, relu2_backward),
    "swiglu": (swiglu, swiglu_backward),
}


@cache
def loops(act: str) -> tuple[Loop, Loop]:
    """Return an activation's forward and backward loops.

    An extension's are compiled in each process: the disk cache does not detect changes of its file.
    """
    functions = ACTIVATIONS[act].functions
    if functions is None:
        return LOOPS[act]
    value, derivative = map(inline, functions)

    def forward(first, last, y, pre):
        for i in range(first, last):
            yi, pi = y[i], pre[i]
            for j in range(pi.shape[0]):
                put(yi, j, value(get(pi, j)))

    def backward(first, last, y, pre):
        for i in range(first, last):
            yi, pi = y[i], pre[i]
            for j in range(pi.shape[0]):
                x = get(pi, j)
                dy = get(yi, j)
                put(pi, j, dy * derivative(x))
                put(yi, j, value(x))

    return jit(forward, is_kept=False), jit(backward, is_kept=False)

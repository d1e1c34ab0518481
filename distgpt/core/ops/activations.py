"""The activations of an MLP, by their names in the setting `mlp`, with reference implementations.

Fast versions are in core/cpu/fused/activations.py and gpu/cu/elementwise.cu. NumPy is imported lazily because
settings read the names, and `--help` must not wait for NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distgpt.core.ops.api import Array


Scalar = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Activation:
    """y = f(pre). If gated, y = f(left) · right, with the halves of pre, which is twice as wide as y."""

    compute: Callable[[Array], tuple[Array, Array]]  # x → f(x), f'(x)
    gated: bool = False
    functions: tuple[Scalar, Scalar] | None = None  # an extension's f and f' of a number, to be compiled


def activation_of(value: Scalar, derivative: Scalar) -> Activation:
    """Return an elementwise activation for an extension: y = value(pre), on CPUs.

    Numba compiles both functions, so they may use only arithmetic and the functions of `math`.
    """

    def compute(x: Array) -> tuple[Array, Array]:
        import numpy as np

        return np.vectorize(value)(x), np.vectorize(derivative)(x)

    return Activation(compute, functions=(value, derivative))


def gelu(x: Array) -> tuple[Array, Array]:
    """GELU in its tanh form: f(x) = x/2 · (1 + tanh(a (x + 0.044715 x³))), a = √(2/π)."""
    import numpy as np

    a = math.sqrt(2 / math.pi)
    t = np.tanh(a * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * 0.044715 * x**2)


def relu(x: Array) -> tuple[Array, Array]:
    """f(x) = max(x, 0)"""
    return x.clip(0), (x > 0).astype(x.dtype)


def relu2(x: Array) -> tuple[Array, Array]:
    """f(x) = max(x, 0)²"""
    positive = x.clip(0)
    return positive**2, 2 * positive


def silu(x: Array) -> tuple[Array, Array]:
    """f(x) = x σ(x), with σ(x) = 1 / (1 + e⁻ˣ)"""
    import numpy as np

    sigmoid = 1 / (1 + np.exp(-x))
    value = x * sigmoid
    return value, sigmoid + value * (1 - sigmoid)


ACTIVATIONS = {
    "gelu": Activation(gelu),
    "relu": Activation(relu),
    "relu2": Activation(relu2),
    "swiglu": Activation(silu, gated=True),
}

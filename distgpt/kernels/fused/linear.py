"""Linear layers on the BLAS that NumPy loaded, and activations: GELU (tanh form), ReLU and SwiGLU.

The BLAS is called by symbol: NumPy's own matmul cannot accumulate into its output, and compiled code cannot
call it. It runs at one thread here: the backend's workers are the only thread pool in the process. A bias is
written into the output first, and the matmul added to it.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import types

from distgpt.errors import DistgptError
from distgpt.kernels.fused.jit import by_types, exp, get, inline, jit, number, put

ROW_MAJOR, PLAIN, TRANSPOSED, LOWER = 101, 111, 112, 122
GEMM, SYRK = "fffnnnrpnpnrpn", "fffnnrpnrpn"  # arguments of the BLAS's routines, as `_external` reads them
KINDS = {"s": types.float32, "d": types.float64}


def _numpy_blas() -> Any:
    """Open the shared library whose symbols include those of NumPy's BLAS."""
    core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
    return ctypes.CDLL(core.__file__)


def _find(library: Any, routine: str) -> tuple[Any, bool]:
    """Return the routine, under any of the names builds give it, and whether its integers have 64 bits."""
    for name, wide in (
        (f"scipy_cblas_{routine}64_", True),
        (f"cblas_{routine}64_", True),
        (f"cblas_{routine}$NEWLAPACK$ILP64", True),
        (f"scipy_cblas_{routine}", False),
        (f"cblas_{routine}", False),
    ):
        if hasattr(library, name):
            return getattr(library, name), wide
    raise DistgptError(f"this NumPy carries no BLAS with {routine}; `pip install numpy` brings one")


def _external(library: Any, routine: str, real: Any, arguments: str) -> Any:
    """Make the routine known to the compiler under a name that includes its integer width.

    `arguments`: f, a flag; n, a count; r, a number; p, an array.
    """
    function, wide = _find(library, routine)
    symbol = f"distgpt_{routine}_{64 if wide else 32}"
    llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    count = types.int64 if wide else types.int32
    of_letter = {"f": types.int32, "n": count, "r": real, "p": types.CPointer(real)}
    return types.ExternalFunction(symbol, types.void(*(of_letter[letter] for letter in arguments)))


_library = _numpy_blas()
_sgemm, _dgemm = (_external(_library, f"{kind}gemm", real, GEMM) for kind, real in KINDS.items())
_ssyrk, _dsyrk = (_external(_library, f"{kind}syrk", real, SYRK) for kind, real in KINDS.items())


def single_threaded_blas() -> None:
    """Keep BLAS from starting threads of its own."""
    for name in (
        "scipy_openblas_set_num_threads64_",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ):
        if hasattr(_library, name):
            getattr(_library, name)(1)


def blas_core_name() -> str:
    """Return the processor that the BLAS was tuned for, as it names it, or an empty string."""
    for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
        if hasattr(_library, name):
            function = getattr(_library, name)
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return ""


@by_types()
def gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """c ← op(a) op(b) + beta c, inside compiled loops. op(a) is (m, k), op(b) (k, n), c (m, n), row-major."""
    routine, real = (_sgemm, np.float32) if c.dtype == types.float32 else (_dgemm, np.float64)
    one = real(1)

    def call(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
        routine(ROW_MAJOR, ta, tb, m, n, k, one, a.ctypes, lda, b.ctypes, ldb, real(beta), c.ctypes, ldc)

    return call


@by_types()
def squared(c, a):
    """The lower half of c ← a aᵀ, inside compiled loops."""
    routine, real = (_ssyrk, np.float32) if c.dtype == types.float32 else (_dsyrk, np.float64)
    one, zero = real(1), real(0)

    def call(c, a):
        n, k = a.shape
        routine(ROW_MAJOR, LOWER, PLAIN, n, k, one, a.ctypes, k, zero, c.ctypes, n)

    return call


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
    n, width = last - first, dy.strides[0] // dy.itemsize
    gemm(PLAIN, PLAIN, n, inputs, outputs, dy[first:], width, w, inputs, 0.0, dx[first:], inputs)


@jit
def linear_backward_weights(first, last, dw, dy, x, accumulate):
    """Output rows first … last of dw ← [dw +] dyᵀ x."""
    rows, inputs = x.shape
    width = dy.strides[0] // dy.itemsize
    beta = 1.0 if accumulate else 0.0
    gemm(
        TRANSPOSED,
        PLAIN,
        last - first,
        inputs,
        rows,
        dy[:, first:],
        width,
        x,
        inputs,
        beta,
        dw[first:],
        inputs,
    )


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
    """Work in place: y holds dy and gets the output, pre holds the input and gets its gradient."""
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


FORWARD = {"gelu": gelu, "relu": relu, "relu2": relu2, "swiglu": swiglu}
BACKWARD = {
    "gelu": gelu_backward,
    "relu": relu_backward,
    "relu2": relu2_backward,
    "swiglu": swiglu_backward,
}

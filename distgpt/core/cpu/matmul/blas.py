"""Linear layers on NumPy's BLAS, and without it for few rows.

The BLAS is called by symbol: NumPy's own matmul cannot accumulate into its output, and compiled code cannot
call it. It runs on one thread, because the backend's workers are the only thread pool in the process. A bias
is written to the output before the matmul is added.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import types

from distgpt.core.base.errors import DistgptError
from distgpt.core.cpu.compiling.jit import by_types, get, inline, jit, number, put

ROW_MAJOR, PLAIN, TRANSPOSED, LOWER = 101, 111, 112, 122  # values from cblas.h
GEMM, SYRK = "fffnnnrpnpnrpn", "fffnnrpnrpn"  # arguments of the BLAS routines in the notation of `_external`
KINDS = {"s": types.float32, "d": types.float64}


# The shared library that exposes the symbols of NumPy's BLAS
_numpy = sys.modules.get("numpy._core._multiarray_umath") or sys.modules["numpy.core._multiarray_umath"]
_library = ctypes.CDLL(_numpy.__file__)


def _external(routine: str, real: types.Type, arguments: str) -> types.ExternalFunction:
    """Register a routine with the compiler under a name that includes its integer width.

    `arguments`: f, a flag; n, a count; r, a number; p, an array.
    """
    builds = {  # name in each build → bits of its integers
        f"scipy_cblas_{routine}64_": 64,  # OpenBLAS in wheels of NumPy
        f"cblas_{routine}64_": 64,  # OpenBLAS built with 64-bit integers
        f"cblas_{routine}$NEWLAPACK$ILP64": 64,  # Apple's Accelerate
        f"scipy_cblas_{routine}": 32,
        f"cblas_{routine}": 32,  # distributions and conda: OpenBLAS, MKL, BLIS
    }
    name = next((name for name in builds if hasattr(_library, name)), None)
    if name is None:
        raise DistgptError(f"this NumPy has no BLAS with {routine}; reinstall it with pip install numpy")
    symbol = f"distgpt_{routine}_{builds[name]}"
    llvm.add_symbol(symbol, ctypes.cast(getattr(_library, name), ctypes.c_void_p).value)
    count = types.int64 if builds[name] == 64 else types.int32
    of_letter = {"f": types.int32, "n": count, "r": real, "p": types.CPointer(real)}
    return types.ExternalFunction(symbol, types.void(*(of_letter[letter] for letter in arguments)))


_sgemm, _dgemm = (_external(f"{kind}gemm", real, GEMM) for kind, real in KINDS.items())
_ssyrk, _dsyrk = (_external(f"{kind}syrk", real, SYRK) for kind, real in KINDS.items())


def single_threaded_blas() -> None:
    """Prevent the BLAS from starting its own threads."""
    for set_number in _of_openblas("set_num_threads"):
        set_number(1)


def blas_core_name() -> str:
    """Return the processor that the BLAS was tuned for, by the BLAS's name for it, or "" if unknown."""
    for get_name in _of_openblas("get_corename"):
        get_name.restype = ctypes.c_char_p
        return str(get_name().decode())
    return ""


def _of_openblas(function: str) -> list[Any]:
    """Return a function of OpenBLAS under the names in its builds; empty for another BLAS."""
    names = f"scipy_openblas_{function}64_", f"openblas_{function}64_", f"openblas_{function}"
    return [getattr(_library, name) for name in names if hasattr(_library, name)]


# OpenBLAS names of processors whose sgemm and ssyrk round an element the same however rows and columns are
# split, except in small products. On a Haswell they do not; other processors were not tested.
_ALIKE = frozenset({"SkylakeX"})


def rows_round_alike() -> bool:
    """Return whether threads may split the rows of a product without changing its rounding."""
    return blas_core_name() in _ALIKE


@by_types()
def gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """c ← op(a) op(b) + beta c in compiled loops. op(a) is (m, k), op(b) (k, n), c (m, n), row-major."""
    routine, real = (_sgemm, np.float32) if c.dtype == types.float32 else (_dgemm, np.float64)
    one = real(1)

    def call(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
        routine(ROW_MAJOR, ta, tb, m, n, k, one, a.ctypes, lda, b.ctypes, ldb, real(beta), c.ctypes, ldc)

    return call


@by_types()
def squared(top, bottom, c, a):
    """Rows top … bottom of the lower half of c ← a aᵀ, in compiled loops."""
    routine, real = (_ssyrk, np.float32) if c.dtype == types.float32 else (_dsyrk, np.float64)
    one, zero = real(1), real(0)

    def call(top, bottom, c, a):
        n, k = a.shape
        rows, out = a[top:], c[top:]
        if 0 < top < bottom:
            gemm(PLAIN, TRANSPOSED, bottom - top, top, k, rows, k, a, k, 0.0, out, n)
        if top < bottom:
            square = out[:, top:]
            routine(ROW_MAJOR, LOWER, PLAIN, bottom - top, k, one, rows.ctypes, k, zero, square.ctypes, n)

    return call


@jit
def linear(first, last, y, x, w, b):
    """Rows first … last of y ← x wᵀ + b."""
    outputs, inputs = w.shape
    beta = 0.0
    if b is not None:
        beta = 1.0
        _repeat(y[first:last], b)
    n = last - first
    width = y.strides[0] // y.itemsize
    gemm(PLAIN, TRANSPOSED, n, outputs, inputs, x[first:], inputs, w, inputs, beta, y[first:], width)


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
    beta = 0.0
    if b is not None:
        beta = 1.0
        _repeat(y[:, first:last], b[first:last])
    n = last - first
    width = y.strides[0] // y.itemsize
    gemm(PLAIN, TRANSPOSED, rows, n, inputs, x, inputs, w[first:], inputs, beta, y[:, first:], width)


@jit
def linear_few_rows(first, last, y, x, w, b):
    """Columns first … last of y ← x wᵀ + b for a few rows, when reading w is the bottleneck."""
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
    n = last - first
    width = dy.strides[0] // dy.itemsize
    gemm(PLAIN, PLAIN, n, inputs, outputs, dy[first:], width, w, inputs, 0.0, dx[first:], inputs)


@jit
def linear_backward_weights(first, last, dw, dy, x, accumulate):
    """Output rows first … last of dw ← [dw +] dyᵀ x."""
    rows, inputs = x.shape
    width = dy.strides[0] // dy.itemsize
    beta = 1.0 if accumulate else 0.0
    n = last - first
    columns = dy[:, first:]
    gemm(TRANSPOSED, PLAIN, n, inputs, rows, columns, width, x, inputs, beta, dw[first:], inputs)

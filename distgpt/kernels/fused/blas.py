"""Matmuls inside compiled loops: the BLAS that NumPy already loaded, called by symbol.

NumPy's own matmul cannot accumulate into its output and cannot be called from compiled code; its library can.
That library runs at one thread here: the backend's own workers are the only thread pool in the process.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import types
from numba.extending import overload

from distgpt.errors import DistgptError

ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112


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


def _external(library: Any, routine: str, real: Any) -> Any:
    """Make the routine known to the compiler under a name that includes its integer width."""
    function, wide = _find(library, routine)
    symbol = f"distgpt_{routine}_{64 if wide else 32}"
    llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    flag, count, pointer = types.int32, types.int64 if wide else types.int32, types.CPointer(real)
    signature = types.void(
        *(flag, flag, flag, count, count, count, real, pointer, count, pointer, count, real, pointer, count)
    )
    return types.ExternalFunction(symbol, signature)


_library = _numpy_blas()
_sgemm = _external(_library, "sgemm", types.float32)
_dgemm = _external(_library, "dgemm", types.float64)


def single_threaded() -> None:
    """Keep BLAS from starting threads of its own."""
    for name in (
        "scipy_openblas_set_num_threads64_",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ):
        if hasattr(_library, name):
            getattr(_library, name)(1)


def core_name() -> str:
    """Return the processor that the BLAS was tuned for, as it names it, or an empty string."""
    for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
        if hasattr(_library, name):
            function = getattr(_library, name)
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return ""


def gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
    """c ← op(a) op(b) + beta c, inside compiled loops. op(a) is (m, k), op(b) (k, n), c (m, n), row-major."""
    raise NotImplementedError


@overload(gemm)
def _gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
    routine, real = (_sgemm, np.float32) if c.dtype == types.float32 else (_dgemm, np.float64)
    one = real(1)

    def call(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc):
        routine(ROW_MAJOR, ta, tb, m, n, k, one, a.ctypes, lda, b.ctypes, ldb, real(beta), c.ctypes, ldc)

    return call

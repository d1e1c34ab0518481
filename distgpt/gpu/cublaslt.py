"""The matmul functions of cuBLASLt through ctypes, and names for its constants."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

from distgpt.core.base.errors import DistgptError
from distgpt.gpu import probe

NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")


class Status(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 7
    NOT_SUPPORTED = 15


class DataType(IntEnum):
    R_32F = 0
    R_64F = 1
    R_16BF = 14


class Compute(IntEnum):
    COMPUTE_32F = 68
    COMPUTE_64F = 70
    COMPUTE_32F_FAST_TF32 = 77


class Epilogue(IntEnum):
    DEFAULT = 1
    BIAS = 4
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    BGRADB = 512


class Reduction(IntEnum):
    """Methods to reduce the parts of a matmul split along k: bits of a mask."""

    COMPUTE_TYPE = 2
    MASK = 7


class Desc(IntEnum):
    """Attributes of a matmul descriptor."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12


class Shape(IntEnum):
    """Attributes of a matrix layout."""

    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6  # elements


class Pref(IntEnum):
    """Preferences of a search for algorithms."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


# The C types of attributes that are not 32-bit integers.
_TYPES: Mapping[tuple[str, int], Any] = {
    ("MatmulDesc", Desc.BIAS_POINTER): c_void_p,
    ("MatmulDesc", Desc.EPILOGUE_AUX_POINTER): c_void_p,
    ("MatmulDesc", Desc.EPILOGUE_AUX_LD): c_int64,
    ("MatrixLayout", Shape.STRIDED_BATCH_OFFSET): c_int64,
    ("MatmulPreference", Pref.MAX_WORKSPACE_BYTES): c_uint64,
}


class Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    _fields_ = (
        ("algo", Algorithm),
        ("workspaceSize", c_size_t),
        ("state", c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", c_int * 4),
    )


_ARGUMENTS = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(HeuristicResult), POINTER(c_int)),
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class LtError(DistgptError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class CublasLt:
    """cuBLASLt on the current device. Its objects are addresses and are never freed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusName.restype = ctypes.c_char_p
        self.version: int = library.cublasLtGetVersion()
        self.matmul = library.cublasLtMatmul  # called directly because it is called often; returns a status
        try:
            self.handle = self._create("cublasLtCreate")
        except LtError as error:
            raise LtError(f"{error}; check the GPU and its driver", error.status) from None

    def descriptor(self, compute: Compute, scale: DataType, attributes: Mapping[Desc, int]) -> int:
        """Create a descriptor. `scale` is the type of alpha and beta, which are read from the host."""
        made = self._create("cublasLtMatmulDescCreate", compute, scale)
        for attribute, value in attributes.items():
            self.set_descriptor(made, attribute, value)
        return made

    def set_descriptor(self, descriptor: int, attribute: Desc, value: int) -> None:
        self._set("MatmulDesc", descriptor, attribute, value)

    def layout(self, data_type: DataType, rows: int, columns: int, stride: int = 0, batch: int = 1) -> int:
        """Create the layout of a column-major matrix, or of a batch of consecutive matrices.

        Columns are contiguous, or `stride` elements apart.
        """
        made = self._create("cublasLtMatrixLayoutCreate", data_type, rows, columns, stride or rows)
        if batch > 1:
            self._set("MatrixLayout", made, Shape.BATCH_COUNT, batch)
            self._set("MatrixLayout", made, Shape.STRIDED_BATCH_OFFSET, (stride or rows) * columns)
        return made

    def algorithms(
        self, descriptor: int, a: int, b: int, d: int, preferences: Mapping[Pref, int], count: int
    ) -> list[Algorithm]:
        """Return at most `count` algorithms for D ← A B (+ D), the fastest estimate first."""
        preference = self._create("cublasLtMatmulPreferenceCreate")
        results, found = (HeuristicResult * count)(), c_int()
        try:
            for attribute, value in preferences.items():
                self._set("MatmulPreference", preference, attribute, value)
            arguments = (self.handle, descriptor, a, b, d, d, preference, count, results, byref(found))
            self._call("cublasLtMatmulAlgoGetHeuristic", *arguments)
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        good = (result for result in results[: found.value] if result.state == Status.SUCCESS)
        return [Algorithm.from_buffer_copy(result.algo) for result in good]

    def check(self, function: str, status: int) -> None:
        if status != Status.SUCCESS:
            name = self.library.cublasLtGetStatusName(status).decode()
            raise LtError(f"cuBLASLt {self.version}: {function} returned {name}", status)

    def _set(self, kind: str, made: int, attribute: IntEnum, value: int) -> None:
        box = _TYPES.get((kind, attribute), c_int32)(value)
        self._call(f"cublasLt{kind}SetAttribute", made, attribute, byref(box), ctypes.sizeof(box))

    def _create(self, function: str, *arguments: int) -> int:
        made = c_void_p()
        self._call(function, byref(made), *arguments)
        assert made.value is not None
        return made.value

    def _call(self, function: str, *arguments: Any) -> None:
        self.check(function, getattr(self.library, function)(*arguments))


def load() -> CublasLt | None:
    """Open cuBLASLt on the current device, or return None if it is not installed."""
    library = probe.load_library(NAMES)
    return None if library is None else CublasLt(library)

"""An emulation of cuBLASLt from its header: column-major, with sums in float64 by NumPy.

It is called through C with the header's types, rejects calls that the header forbids, offers algorithms with
different requirements, and records searches. The library's constants are repeated here to detect wrong ones in the
package.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import traceback
from collections.abc import Callable
from ctypes import c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.gpu.device import STORAGE
from numpy.lib.stride_tricks import as_strided

SUCCESS, NOT_INITIALIZED, INVALID, EXECUTION_FAILED, INTERNAL, NOT_SUPPORTED = 0, 1, 7, 13, 14, 15
NAMES = {7: "INVALID_VALUE", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED"}
NAMES = {code: f"CUBLAS_STATUS_{name}" for code, name in NAMES.items()}
BF16 = 14
DTYPES = {0: STORAGE["float32"], 1: STORAGE["float64"], BF16: STORAGE["bfloat16"]}
SUMS = {(68, 0): "float", (77, 0): "tf32", (70, 1): "double"}  # keys: types of sums, and of alpha and beta
TYPES = {("float", BF16, BF16), ("float", BF16, 0), ("float", 0, 0), ("tf32", 0, 0), ("double", 1, 1)}
BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU, BGRADB = 4, 160, 164, 192, 512  # epilogues
# Attributes of a matmul and of a search: size in bytes, and default.
TRANSA, TRANSB, EPILOGUE, BIAS_AT, AUX_AT, AUX_LD = 3, 4, 7, 8, 11, 12
OF_MATMUL = {TRANSA: (4, 0), TRANSB: (4, 0), EPILOGUE: (4, 1), BIAS_AT: (8, 0), AUX_AT: (8, 0), AUX_LD: (8, 0)}
BATCH, APART = 5, 6  # attributes of a layout: number of matrices, and elements between them
OF_LAYOUT = {BATCH: 4, APART: 8}
WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # alignments of A, B, C, D
OF_SEARCH = {WORKSPACE: (8, 0), REDUCTIONS: (4, 7), **dict.fromkeys(ALIGNMENTS, (4, 256))}
MARK = 0x616C676F72697468

# Parameters of the header's functions, which return a status.
_DESC, _LAYOUT, _PREF = "cublasLtMatmulDesc_t", "cublasLtMatrixLayout_t", "cublasLtMatmulPreference_t"
_FOUR, _SET = ", ".join([_LAYOUT] * 4), "const void*, size_t"
_WITH_LAYOUT = f"const void*, {_LAYOUT}"
PROTOTYPES = {
    "Create": "cublasLtHandle_t*",
    "Destroy": "cublasLtHandle_t",
    "MatmulDescCreate": f"{_DESC}*, cublasComputeType_t, cudaDataType_t",
    "MatmulDescDestroy": _DESC,
    "MatmulDescSetAttribute": f"{_DESC}, cublasLtMatmulDescAttributes_t, {_SET}",
    "MatrixLayoutCreate": f"{_LAYOUT}*, cudaDataType_t, uint64_t, uint64_t, int64_t",
    "MatrixLayoutDestroy": _LAYOUT,
    "MatrixLayoutSetAttribute": f"{_LAYOUT}, cublasLtMatrixLayoutAttribute_t, {_SET}",
    "MatmulPreferenceCreate": f"{_PREF}*",
    "MatmulPreferenceDestroy": _PREF,
    "MatmulPreferenceSetAttribute": f"{_PREF}, cublasLtMatmulPreferenceAttributes_t, {_SET}",
    "MatmulAlgoGetHeuristic": f"cublasLtHandle_t, {_DESC}, {_FOUR}, {_PREF}, "
    "int, cublasLtMatmulHeuristicResult_t*, int*",
    "Matmul": f"cublasLtHandle_t, {_DESC}, const void*, {_WITH_LAYOUT}, {_WITH_LAYOUT}, const void*, "
    f"{_WITH_LAYOUT}, void*, {_LAYOUT}, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t",
}
_C_TYPES = {"size_t": c_size_t, "uint64_t": c_uint64, "int64_t": c_int64, "int": c_int}
_C_TYPES |= {"cudaDataType_t": c_int, "cublasComputeType_t": c_int}


def _c_type(name: str) -> Any:
    return _C_TYPES.get(name) or (c_int if name.endswith(("Attributes_t", "Attribute_t")) else c_void_p)


class Algorithm(NamedTuple):
    """Requirements: reduction scheme, workspace, alignment of matrices and of bias and aux.

    `breaks`: fails when started; `state`: listed as unusable.
    """

    reduction: int
    workspace: int
    alignment: int
    extras: int
    breaks: bool = False
    state: int = SUCCESS


ALGORITHMS = [
    Algorithm(1, 1024, 16, 16),  # parts added up in place
    Algorithm(0, 1 << 30, 2, 2),
    Algorithm(0, 0, 16, 16, state=NOT_SUPPORTED),
    Algorithm(0, 0, 256, 16),
    Algorithm(2, 4096, 16, 16),  # parts in the type of the sums
    Algorithm(0, 0, 16, 2, breaks=True),
    Algorithm(0, 0, 2, 2),
    Algorithm(4, 4096, 2, 16),  # parts in the type of the output
]


class _Result(ctypes.Structure):
    _fields_ = (
        *(("algo", c_uint64 * 8), ("workspaceSize", c_size_t), ("state", c_int)),
        *(("wavesCount", ctypes.c_float), ("reserved", c_int * 4)),
    )


class Refused(Exception):
    """The status of a call that failed."""


def _require(true: object, status: int = INVALID) -> None:
    if not true:
        raise Refused(status)


@dataclass
class Layout:
    type: int
    rows: int
    columns: int
    ld: int
    batch: int = 1
    apart: int = 0

    @property
    def row_bytes(self) -> int:
        return self.ld * DTYPES[self.type].itemsize


class Descriptor(dict[int, int]):
    """Attributes of a matmul, with the types of its sums and factors."""

    types: tuple[int, ...] = ()

    @property
    def has_bias(self) -> bool:
        return self[EPILOGUE] in (BIAS, GELU_AUX_BIAS, BGRADB)

    @property
    def has_aux(self) -> bool:
        return self[EPILOGUE] in (GELU_AUX, GELU_AUX_BIAS, DGELU)

    def aligned(self, alignment: int) -> bool:
        used = [self[BIAS_AT]] * self.has_bias + [self[AUX_AT]] * self.has_aux
        return all(at % alignment == 0 for at in used)

    def now(self) -> Descriptor:
        copied = Descriptor(self)
        copied.types = self.types
        return copied


class HostLt:
    """The library as ctypes loads it. `queue(stream, work)` runs work; default: immediately."""

    def __init__(self, queue: Callable[[int, Callable[[], None]], None] | None = None) -> None:
        self._queue = queue or (lambda stream, work: work())
        self.live: dict[int, Any] = {}  # live objects by address
        self._addresses = itertools.count(0x10000, 16)
        self.invalid = self.started = self.searches = 0
        self.algorithm = -1  # the last one
        self.preference: Any = None  # the last search's
        self.refused = -1  # an epilogue that is not supported
        for name, types in PROTOTYPES.items():
            kind = ctypes.CFUNCTYPE(c_int, *map(_c_type, types.split(", ")))
            setattr(self, f"cublasLt{name}", kind(self._checked(getattr(self, f"_{name}"))))
        names = {code: ctypes.create_string_buffer(f"CUBLAS_STATUS_{n}".encode()) for code, n in NAMES.items()}
        name_of = ctypes.CFUNCTYPE(c_void_p, c_int)
        self.cublasLtGetStatusName = name_of(lambda status: ctypes.addressof(names[status]))
        self.cublasLtGetVersion = ctypes.CFUNCTYPE(c_size_t)(lambda: 131000)

    def _checked(self, function: Callable[..., None]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            status = SUCCESS
            try:
                function(*args)
            except Refused as refused:
                status = refused.args[0]
            except Exception:  # C has no exceptions
                traceback.print_exc()
                status = INTERNAL
            self.invalid += status == INVALID
            return status

        return call

    def _make(self, where: int, made: Any) -> None:
        address = next(self._addresses)
        self.live[address] = made
        c_void_p.from_address(where).value = address

    def _destroy(self, address: int) -> None:
        _require(self.live.pop(address, None))

    _Destroy = _MatmulDescDestroy = _MatrixLayoutDestroy = _MatmulPreferenceDestroy = _destroy

    def _Create(self, where: int) -> None:
        self._make(where, "handle")

    def _MatrixLayoutCreate(self, where: int, *values: int) -> None:
        self._make(where, Layout(*values))

    def _MatmulDescCreate(self, where: int, *types: int) -> None:
        made = Descriptor({attribute: value for attribute, (_, value) in OF_MATMUL.items()})
        made.types = types
        self._make(where, made)

    def _MatmulPreferenceCreate(self, where: int) -> None:
        self._make(where, {attribute: value for attribute, (_, value) in OF_SEARCH.items()})

    def _MatmulDescSetAttribute(self, address: int, attribute: int, buffer: int, size: int) -> None:
        made = self.live[address]
        known = OF_MATMUL if isinstance(made, Descriptor) else OF_SEARCH
        _require(attribute in known and size == known[attribute][0])
        made[attribute] = int.from_bytes(ctypes.string_at(buffer, size), "little")

    _MatmulPreferenceSetAttribute = _MatmulDescSetAttribute

    def _MatrixLayoutSetAttribute(self, address: int, attribute: int, buffer: int, size: int) -> None:
        _require(size == OF_LAYOUT.get(attribute))
        value = int.from_bytes(ctypes.string_at(buffer, size), "little")
        setattr(self.live[address], {BATCH: "batch", APART: "apart"}[attribute], value)

    def _MatmulAlgoGetHeuristic(self, handle: int, desc: int, *others: int) -> None:
        *layouts, preference, wanted, results, found = others
        self.searches += 1
        count = c_int.from_address(found)
        count.value = 0
        op, self.preference = self.live[desc], self.live[preference]
        _require(wanted > 0)
        self._fit(op, *(self.live[layout] for layout in layouts))
        known = min(self.preference[one] for one in ALIGNMENTS)
        for number, one in enumerate(ALGORITHMS):
            able = one.workspace <= self.preference[WORKSPACE] and op.aligned(one.extras)
            able &= not one.reduction or bool(one.reduction & self.preference[REDUCTIONS])
            if able and known >= one.alignment and count.value < wanted:
                result = _Result.from_address(results + count.value * ctypes.sizeof(_Result))
                result.algo[0], result.algo[7] = MARK, number
                result.workspaceSize, result.state = one.workspace, one.state
                count.value += 1

    def _fit(self, op: Descriptor, a: Layout, b: Layout, c: Layout, d: Layout) -> None:
        """Reject operands that the header forbids or the library does not support."""
        _require(all(each.ld >= each.rows for each in (a, b, c, d)))
        m, k = (a.columns, a.rows) if op[TRANSA] else (a.rows, a.columns)
        k_of_b, n = (b.columns, b.rows) if op[TRANSB] else (b.rows, b.columns)
        _require(k == k_of_b and (c.type, c.rows, c.columns) == (d.type, m, n) == (d.type, d.rows, d.columns))
        _require(a.batch == b.batch == c.batch == d.batch > 0)
        _require(d.batch == 1 or d.apart >= d.ld * d.columns)  # results must not overlap
        _require(d.batch == 1 or op[EPILOGUE] == 1, NOT_SUPPORTED)
        _require(op[BIAS_AT] or not op.has_bias)
        _require(not op.has_aux or (op[AUX_AT] and op[AUX_LD] >= m and op[AUX_LD] % 8 == 0))
        _require((SUMS.get(op.types), a.type, d.type) in TYPES, NOT_SUPPORTED)
        _require(a.type == b.type, NOT_SUPPORTED)
        _require(op[EPILOGUE] != self.refused, NOT_SUPPORTED)

    def _Matmul(self, handle: int, desc: int, *others: int) -> None:
        alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, size, stream = others
        _require(handle in self.live, NOT_INITIALIZED)
        _require(a and b and c and d and alpha and beta and algo)
        chosen = (c_uint64 * 8).from_address(algo)
        _require(chosen[0] == MARK)
        one, op, layouts = ALGORITHMS[chosen[7]], self.live[desc], [self.live[x] for x in (la, lb, lc, ld)]
        self._fit(op, *layouts)
        _require(not one.breaks, EXECUTION_FAILED)
        _require(all(n % one.alignment == 0 for n in (a, b, c, d, *(x.row_bytes for x in layouts))))
        _require(op.aligned(one.extras) and size >= one.workspace and (workspace or not size))
        self.started, self.algorithm = self.started + 1, int(chosen[7])
        # Descriptors and factors are read when a matmul is started.
        factors = [float(_numbers(at, Layout(op.types[1], 1, 1, 1))[0, 0]) for at in (alpha, beta)]
        now, operands = op.now(), zip((a, b, c, d), layouts, strict=True)

        def work(operands: Any = tuple(operands)) -> None:
            if one.workspace:
                ctypes.memset(workspace, 0xFF, one.workspace)
            for i in range(layouts[3].batch):
                multiply(now, *factors, *(_in_batch(at, layout, i) for at, layout in operands))

        self._queue(stream, work)


def _in_batch(at: int, layout: Layout, i: int) -> tuple[int, Layout]:
    return at + i * layout.apart * DTYPES[layout.type].itemsize, layout


def _view(at: int, layout: Layout) -> Any:
    """View memory as a column-major matrix."""
    dtype, count = DTYPES[layout.type], layout.ld * (layout.columns - 1) + layout.rows
    flat = np.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(at), dtype)
    return as_strided(flat, (layout.rows, layout.columns), (dtype.itemsize, layout.row_bytes))


def _numbers(at: int, layout: Layout) -> Any:
    view = _view(at, layout)
    return (from_bfloat16(view) if layout.type == BF16 else view).astype(np.float64)


def _store(at: int, layout: Layout, values: Any) -> None:
    _view(at, layout)[...] = to_bfloat16(values) if layout.type == BF16 else values


def _as_tf32(values: Any) -> Any:
    """Round to eleven significant bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(fraction, 11)), exponent - 11)


def multiply(op: Descriptor, alpha: float, beta: float, *operands: tuple[int, Layout]) -> None:
    a, b, c, (to, layout) = operands
    left, right = _numbers(*a), _numbers(*b)
    left, right = left.T if op[TRANSA] else left, right.T if op[TRANSB] else right
    if SUMS[op.types] == "tf32":
        left, right = _as_tf32(left), _as_tf32(right)
    aux = op[AUX_AT], replace(layout, ld=op[AUX_LD])
    y = alpha * (left @ right) + (beta * _numbers(*c) if beta else 0)
    if op[EPILOGUE] in (BIAS, GELU_AUX_BIAS):
        y += _numbers(op[BIAS_AT], Layout(layout.type, layout.rows, 1, layout.rows))
    if op[EPILOGUE] in (GELU_AUX, GELU_AUX_BIAS):
        _store(*aux, y)
        y = y / 2 * (1 + _inner_tanh(y))
    if op[EPILOGUE] == DGELU:
        x = _numbers(*aux)
        t, slope = _inner_tanh(x), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        y *= (1 + t) / 2 + x / 2 * (1 - t**2) * slope
    if op[EPILOGUE] == BGRADB:
        _store(op[BIAS_AT], Layout(layout.type, layout.columns, 1, layout.columns), right.sum(0)[:, None])
    _store(to, layout, y)


def _inner_tanh(x: Any) -> Any:
    return np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))

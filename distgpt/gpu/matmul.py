"""Matmuls through cuBLASLt. Each kind is planned once: described, searched for algorithms, timed."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from distgpt.core.ops.api import Array
from distgpt.gpu.cublaslt import (
    Algorithm,
    Compute,
    CublasLt,
    DataType,
    Desc,
    Epilogue,
    LtError,
    Pref,
    Reduction,
    Status,
)
from distgpt.gpu.device import STORAGE, CupyDevice, address

CANDIDATES = 32
WIDEST = 256  # bytes of alignment; no algorithm requires more

_TYPES = {
    "bfloat16": DataType.R_16BF,
    "float32": DataType.R_32F,
    "float64": DataType.R_64F,
}
_EPILOGUES = {
    ("none", False): Epilogue.DEFAULT,
    ("bias", False): Epilogue.BIAS,
    ("gelu", False): Epilogue.GELU_AUX,
    ("gelu", True): Epilogue.GELU_AUX_BIAS,
    ("dgelu", False): Epilogue.DGELU,
    ("column_sums", False): Epilogue.BGRADB,  # sums of the library's B, our a
}
_WITH_BIAS = (Epilogue.BIAS, Epilogue.GELU_AUX_BIAS, Epilogue.BGRADB)
_WITH_AUX = (Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS, Epilogue.DGELU)
_ACCUMULATING = (Epilogue.DEFAULT, Epilogue.BGRADB)
_ADDING = (Epilogue.DEFAULT, Epilogue.BIAS)
_POINTERS = (Desc.BIAS_POINTER, Desc.EPILOGUE_AUX_POINTER)


@dataclass(frozen=True, slots=True)
class Matmul:
    """A kind of matmul, out (m, n) ← a (m, k) · b (k, n). All matrices are row-major and contiguous except
    for `stride`.

    With `transpose_a`, a is stored as (k, m); with `transpose_b`, b as (n, k). Types are "bfloat16",
    "float32" or "float64". Sums are computed in float32 or float64. `epilogue` and its additional argument:

    | epilogue    | meaning                                                       | extra    |
    |-------------|---------------------------------------------------------------|----------|
    | "none"      | out ← a b, or += with `accumulate`                            |          |
    | "bias"      | out ← a b + bias, bias (n,) of the type of out                | bias     |
    | the same, `onto` | out ← onto + …, onto (m, n) of the type of out           | onto     |
    | "gelu"      | aux ← a b (+ bias, if one is given); out ← gelu(aux), tanh    | aux      |
    | "dgelu"     | out ← (a b) · gelu'(aux)                                      | aux      |
    | "column_sums" | out as for "none", bias ← Σ over k of a (m,), the type of out | bias   |

    `batch`: number of matmuls; the matrices of each operand are contiguous.
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    in_type: str
    out_type: str
    epilogue: str = "none"
    accumulate: bool = False
    has_bias: bool = False  # "gelu" only
    onto: bool = False
    stride: int = 0  # elements between rows of a, if a is columns of a wider array
    batch: int = 1


def _alignment(at: int) -> int:
    """Return the largest power of two up to `WIDEST` that divides the address."""
    bits = at | WIDEST
    return bits & -bits


def _row_bytes(kind: Matmul) -> tuple[int, int, int]:
    size, out_size = STORAGE[kind.in_type].itemsize, STORAGE[kind.out_type].itemsize
    a = kind.stride or (kind.m if kind.transpose_a else kind.k)
    b = kind.k if kind.transpose_b else kind.n
    return a * size, b * size, kind.n * out_size


def _bits(algorithm: int) -> str:
    return ctypes.string_at(algorithm, ctypes.sizeof(Algorithm)).hex()


# Addresses of out, a, b and the addend, and host addresses of the factors of a b and the addend.
Addresses = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class _Plan:
    """One kind of matmul for pointers of one alignment. Integers are host addresses."""

    name: str  # the same in every process
    descriptor: int
    a: int
    b: int
    out: int
    wants: tuple[bool, ...]  # whether it uses each of _POINTERS
    candidates: list[Algorithm] = field(default_factory=list)
    refusal: str = ""  # why there is no candidate
    algorithm: int = 0  # 0: not chosen yet
    extras: tuple[int, ...] | None = None  # last device addresses of bias and aux


class LtMatmul:
    """cuBLASLt's matmuls on one device, which also times them."""

    def __init__(self, lt: CublasLt, device: CupyDevice, tf32: bool = False) -> None:
        self.lt, self._device, self._tf32 = lt, device, tf32
        self._deterministic = device.deterministic
        workspace = (64 if device.capability[0] == 9 else 32) << 20  # bytes; Hopper's kernels need more
        self._workspace = device.zeros((workspace,), np.dtype(np.uint8))
        self._plans: dict[tuple[Matmul, int], _Plan] = {}
        self._adopted: Mapping[str, str] = {}
        self._factors: dict[tuple[type, float], Any] = {}  # never freed, since the library reads them
        self.about = (lt.version, tf32)  # must match to adopt another process's algorithms

    def can(self, kind: Matmul) -> bool:
        """Return whether cuBLASLt supports it for aligned arrays. Not allowed while recording."""
        return bool(self._plan(kind, min(map(_alignment, _row_bytes(kind)))).candidates)

    def run(
        self,
        kind: Matmul,
        out: Array,
        a: Array,
        b: Array,
        bias: Array | None = None,
        aux: Array | None = None,
        onto: Array | None = None,
        factors: tuple[float, float] | None = None,
    ) -> None:
        """Start a matmul. The first call for an alignment plans it without changing out's contents.

        `factors` multiply a b and `onto` (0 if there is none).
        """
        at = (address(out), address(a), address(b), address(out if onto is None else onto))
        extras = tuple(0 if each is None else address(each) for each in (bias, aux))
        bits = at[0] | at[1] | at[2] | at[3] | extras[0] | extras[1] | WIDEST
        plan = self._plans.get((kind, bits & -bits)) or self._plan(kind, bits & -bits)
        if plan.extras != extras:
            self._point(plan, kind, extras)
        of = self._boxed(kind, factors or (1.0, float(kind.accumulate or kind.onto)))
        if not plan.algorithm:
            self._choose(plan, kind, out, (*at, *of))
        if status := self._start(plan, plan.algorithm, (*at, *of)):
            self.lt.check(f"cublasLtMatmul of {kind}", status)

    def chosen(self) -> dict[str, str]:
        """Return the chosen algorithm of every plan, as the library's bytes, valid for its version."""
        return {plan.name: _bits(plan.algorithm) for plan in self._plans.values() if plan.algorithm}

    def adopt(self, chosen: Mapping[str, str]) -> bool:
        """Use these algorithms, now or when a plan first runs, if they are candidates here as well.

        Return whether that changed an earlier choice.
        """
        self._adopted, changed = chosen, False
        for plan in self._plans.values():
            algorithm = self._adopted_for(plan)
            if algorithm and plan.algorithm not in (0, algorithm):
                plan.algorithm, changed = algorithm, True
        return changed

    def _adopted_for(self, plan: _Plan) -> int:
        """Return the adopted algorithm's address, or 0."""
        bits, candidates = self._adopted.get(plan.name), map(ctypes.addressof, plan.candidates)
        return next((each for each in candidates if _bits(each) == bits), 0)

    def _start(self, plan: _Plan, algorithm: int, at: Addresses) -> int:
        """Start a matmul. The library is column-major, so it sees transposed matrices: outᵀ ← bᵀ aᵀ."""
        out, a, b, onto, alpha, beta = at
        factors = (alpha, b, plan.b, a, plan.a, beta)
        result = (onto, plan.out, out, plan.out)
        memory = address(self._workspace), self._workspace.nbytes, self._device.stream.ptr
        status: int = self.lt.matmul(self.lt.handle, plan.descriptor, *factors, *result, algorithm, *memory)
        return status

    def _boxed(self, kind: Matmul, factors: tuple[float, float]) -> tuple[int, int]:
        """Return the addresses of alpha and beta, in the type that the library reads."""
        number = ctypes.c_double if kind.in_type == "float64" else ctypes.c_float
        for value in factors:
            if (number, value) not in self._factors:
                self._factors[number, value] = number(value)
        alpha, beta = (ctypes.addressof(self._factors[number, value]) for value in factors)
        return alpha, beta

    def _point(self, plan: _Plan, kind: Matmul, extras: tuple[int, ...]) -> None:
        if tuple(map(bool, extras)) != plan.wants:
            raise ValueError(f"bias or aux do not fit {kind}")
        for attribute, extra in zip(_POINTERS, extras, strict=True):
            if extra:
                self.lt.set_descriptor(plan.descriptor, attribute, extra)
        plan.extras = extras

    def _choose(self, plan: _Plan, kind: Matmul, out: Array, at: Addresses) -> None:
        """Choose an algorithm: the first or, if timing is allowed, the fastest."""
        if not plan.candidates:
            raise LtError(f"no way to compute {kind}: {plan.refusal}", Status.NOT_SUPPORTED)
        if adopted := self._adopted_for(plan):
            plan.algorithm = adopted
            return
        if self._deterministic or len(plan.candidates) == 1:
            plan.algorithm = ctypes.addressof(plan.candidates[0])
        elif kind.accumulate:
            self._device.keep(out, lambda: self._choose_fastest(plan, at))
        else:
            self._choose_fastest(plan, at)

    def _choose_fastest(self, plan: _Plan, at: Addresses) -> None:
        """Choose the fastest algorithm, from an earlier process or by timing."""

        def starts(each: Algorithm) -> bool:
            return self._start(plan, ctypes.addressof(each), at) == Status.SUCCESS

        def accepts(kept: bytes) -> bool:
            return any(bytes(each) == kept and starts(each) for each in plan.candidates)

        def timed() -> bytes:
            plan.candidates = list(filter(starts, plan.candidates)) or plan.candidates[:1]
            works = [partial(self._repeat, plan, ctypes.addressof(each), at) for each in plan.candidates]
            seconds = self._device.times(works)
            return bytes(plan.candidates[seconds.index(min(seconds))])

        result = self._device.kept.choice(f"{plan.name} {self.about}", accepts, timed)
        chosen = next(each for each in plan.candidates if bytes(each) == result)
        plan.algorithm = ctypes.addressof(chosen)

    def _repeat(self, plan: _Plan, algorithm: int, at: Addresses) -> None:
        self.lt.check("cublasLtMatmul", self._start(plan, algorithm, at))

    def _plan(self, kind: Matmul, alignment: int) -> _Plan:
        """Return the plan for pointers of this alignment, made at the first call."""
        if (kind, alignment) not in self._plans:
            self._plans[kind, alignment] = self._new_plan(kind, alignment)
        return self._plans[kind, alignment]

    def _new_plan(self, kind: Matmul, alignment: int) -> _Plan:
        epilogue = _EPILOGUES[kind.epilogue, kind.has_bias]
        wants = (epilogue in _WITH_BIAS, epilogue in _WITH_AUX)
        in_type, out_type = _TYPES[kind.in_type], _TYPES[kind.out_type]
        m, n, k = kind.m, kind.n, kind.k
        a = self.lt.layout(in_type, *((m, k) if kind.transpose_a else (k, m)), kind.stride, kind.batch)
        b = self.lt.layout(in_type, *((k, n) if kind.transpose_b else (n, k)), batch=kind.batch)
        out = self.lt.layout(out_type, n, m, batch=kind.batch)
        attributes: dict[Desc, int] = {
            Desc.TRANSA: int(kind.transpose_b),
            Desc.TRANSB: int(kind.transpose_a),
            Desc.EPILOGUE: epilogue,
        }
        # The search uses the alignment of these pointers, not their contents.
        if wants[0]:
            attributes[Desc.BIAS_POINTER] = alignment
        if wants[1]:
            attributes |= {Desc.EPILOGUE_AUX_POINTER: alignment, Desc.EPILOGUE_AUX_LD: n}
        compute, scale = self._arithmetic(in_type)
        descriptor = self.lt.descriptor(compute, scale, attributes)
        plan = _Plan(f"{kind} at multiples of {alignment}", descriptor, a, b, out, wants)
        plan.candidates, plan.refusal = self._search(kind, plan, alignment)
        return plan

    def _arithmetic(self, in_type: DataType) -> tuple[Compute, DataType]:
        """Return the type of the sums, and the type of alpha and beta."""
        if in_type is DataType.R_64F:
            return Compute.COMPUTE_64F, DataType.R_64F
        inexact = self._tf32 and in_type is DataType.R_32F
        return Compute.COMPUTE_32F_FAST_TF32 if inexact else Compute.COMPUTE_32F, DataType.R_32F

    def _search(self, kind: Matmul, plan: _Plan, alignment: int) -> tuple[list[Algorithm], str]:
        """Return the candidates, or why there are none."""
        epilogue = _EPILOGUES[kind.epilogue, kind.has_bias]
        adds = (not kind.accumulate or epilogue in _ACCUMULATING) and (not kind.onto or epilogue in _ADDING)
        if not adds or (epilogue in _WITH_AUX and kind.n % 8):  # aux requires rows of a multiple of 8
            return [], "cuBLASLt has no such epilogue"
        a_bytes, b_bytes, out_bytes = (min(alignment, _alignment(row)) for row in _row_bytes(kind))
        # Parts of a split matmul that are rounded to bfloat16 do not give a float32 sum. Parts that are added
        # in place arrive in any order.
        parts_apart = self._deterministic or kind.out_type == "bfloat16"
        preferences = {
            Pref.MAX_WORKSPACE_BYTES: self._workspace.nbytes,
            Pref.REDUCTION_SCHEME_MASK: Reduction.COMPUTE_TYPE if parts_apart else Reduction.MASK,
            Pref.MIN_ALIGNMENT_A_BYTES: b_bytes,  # the library's A is our b
            Pref.MIN_ALIGNMENT_B_BYTES: a_bytes,
            Pref.MIN_ALIGNMENT_C_BYTES: out_bytes,
            Pref.MIN_ALIGNMENT_D_BYTES: out_bytes,
        }
        try:
            result = self.lt.algorithms(plan.descriptor, plan.b, plan.a, plan.out, preferences, CANDIDATES)
        except LtError as error:
            if error.status not in (Status.NOT_SUPPORTED, Status.INVALID_VALUE):
                raise
            return [], str(error)
        return result, "cuBLASLt found no algorithm"


Gather = Callable[[bytes], list[bytes]]  # collective: every rank's bytes, in order


def share_autotuning(gather: Gather, device: CupyDevice, matmuls: LtMatmul) -> None:
    """Share autotuning results among identical GPUs, so that one unlucky timing does not slow the job.

    Each rank adopts the results of the first rank with an identical GPU, for the matmuls that both have
    timed; ranks may have different numbers of rows. Work recorded with another choice is recorded again.
    Collective.
    """
    # Results are valid for GPUs with this description in JSON.
    kind = [device.name, *device.capability, device.multiprocessors, device.memory()[1], *matmuls.about]
    ways = {str(key): chosen for key, chosen in device.choices.items()}
    own = {"gpu": kind, "algorithms": matmuls.chosen(), "ways": ways}
    first = next(
        each for each in map(json.loads, gather(json.dumps(own).encode())) if each["gpu"] == own["gpu"]
    )
    choices = {key: first["ways"].get(str(key), chosen) for key, chosen in device.choices.items()}
    others = choices != device.choices
    device.choices.update(choices)
    if matmuls.adopt(first["algorithms"]) or others:
        device.record_anew()

"""The processor that LLVM compiles for, and how our microkernels use its registers."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import numba

from distgpt.core.base.tables import MissingComponent, Table
from distgpt.core.cpu.compiling.registers import AVX2, AVX512, AVX512_BF16, Shape


@cache
def processor() -> tuple[str, str]:
    """Return name and features as LLVM gives them, or as NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
    name = numba.config.CPU_NAME or llvm.get_host_cpu_name()
    if (features := numba.config.CPU_FEATURES) is None:
        of_llvm = llvm.get_host_cpu_features().flatten()
        features = ",".join(filter(None, [of_llvm, *(f"+{name}" for name in unlisted_features())]))
    return name, features


@dataclass(frozen=True, slots=True)
class Processor:
    """A row of the table of processors: an instruction set with a use of registers of its own."""

    shape: Callable[[set[str]], Shape | None]  # by the processor's features; None: it is not used
    hint: Callable[[set[str]], str] = lambda features: ""  # how its user turns it on; "" where it is on


# By a feature of those processors, in LLVM's words; the plain ones are AVX2 and AVX-512.
PROCESSORS: Table[Processor] = Table("processors", "processor", {})
# By the system's name of a machine: what finds features of it that neither LLVM nor Numba finds.
UNLISTED: Table[Callable[[], list[str]]] = Table("features", "machine", {})


@cache
def unlisted_features() -> list[str]:
    """List the features, by LLVM's names, that neither LLVM nor Numba finds: those of arm64."""
    try:
        find = UNLISTED.get(platform.machine().lower())
    except MissingComponent:  # its loops are plain then, as those of any processor
        return []
    return find() if find else []


def features() -> set[str]:
    """Return the processor's features, by LLVM's names."""
    return {feature[1:] for feature in processor()[1].split(",") if feature.startswith("+")}


@cache
def shape() -> Shape:
    """Return how this processor's registers are used. Without AVX, LLVM splits the vectors itself."""
    for kind in _kinds():
        if (own := kind.shape(features())) is not None:
            return own
    if "avx512f" not in features():
        return AVX2
    return AVX512_BF16 if multiplies_pairs_fast() else AVX512


def hint() -> str:
    """Return how to turn on instructions that this processor has, and that are off; "" if none are."""
    return next(filter(None, (kind.hint(features()) for kind in _kinds())), "")


def _kinds() -> list[Processor]:
    """Return the rows for this processor. The table is asked for no other, so none is imported in vain."""
    return [kind for _, kind in PROCESSORS.rows(name for name in PROCESSORS if name in features())]


def multiplies_pairs_fast() -> bool:
    """Return whether vdpbf16ps beats float32's multiply-adds: on AMD; Intel's has a quarter of the rate."""
    return "avx512bf16" in features() and processor()[0].startswith("znver")

"""The target processor of LLVM, and how our microkernels use its registers."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.binding as llvm
import numba

FLOAT32, BFLOAT16 = "float32", "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """A microkernel's register allocation.

    B takes `vectors` registers of `lanes` float32, and A up to `rows` rows. The register file must hold rows
    · vectors sums, the B of one step, and one element of A.
    """

    lanes: int
    vectors: int
    rows: int
    dot: bool = False  # has a fast instruction for products of bfloat16 pairs (AVX512_BF16)
    amx: bool = False  # has tile registers for bfloat16 (amx.py), which hold more rows
    panel: int = 0  # columns of a panel of B if it is wider than the registers

    @property
    def columns(self) -> int:
        return self.panel or self.lanes * self.vectors

    def narrow(self) -> Shape:
        """Return the shape that processes only the first register's columns of a panel."""
        return replace(self, vectors=1, panel=self.columns)

    @property
    def at_once(self) -> int:
        """Return the rows whose sums fit the vector registers. A taller tile is computed in parts."""
        return AVX512_BF16.rows if self.amx else self.rows

    def widens(self, operand: str) -> bool:
        """Return whether operands are widened to float32 before multiplication."""
        return operand == BFLOAT16 and not self.dot


# AVX-512 has 32 registers: 28 hold sums and 2 the B of a step. AVX2 has 16: 12 and 2. More rows would spill,
# and fewer would read B too often (docs/explanation/matmul.md).
AVX512 = Shape(lanes=16, vectors=2, rows=14)
AVX512_BF16 = Shape(lanes=16, vectors=2, rows=14, dot=True)
AVX2 = Shape(lanes=8, vectors=2, rows=6)
ARM64 = Shape(lanes=4, vectors=4, rows=6)  # any model: uses only NEON instructions
AMX = Shape(lanes=16, vectors=2, rows=32, dot=True, amx=True)
AMX_VARIABLE = "DISTGPT_AMX"
AMX_OFF = f"{AMX_VARIABLE} turns it off"
AMX_REFUSED = "Linux does not grant it: Linux 5.16 and a container that allows the request are required"
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # system call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


@cache
def processor() -> tuple[str, str]:
    """Return name and features from LLVM, or from NUMBA_CPU_NAME and NUMBA_CPU_FEATURES if set."""
    name = numba.config.CPU_NAME or llvm.get_host_cpu_name()
    features = numba.config.CPU_FEATURES
    return name, llvm.get_host_cpu_features().flatten() if features is None else features


def features() -> set[str]:
    """Return the processor's features by their LLVM names."""
    return {feature[1:] for feature in processor()[1].split(",") if feature.startswith("+")}


@cache
def shape() -> Shape:
    """Return this processor's register allocation. Without AVX, LLVM splits the vectors."""
    if has_amx() and amx_wanted() and amx_granted():
        return AMX
    if "avx512f" not in features():
        return ARM64 if platform.machine().lower() in ("arm64", "aarch64") else AVX2
    # vdpbf16ps is faster than float32 multiply-adds only on AMD. On Intel it has 1/4 of the rate.
    pairs_are_fast = "avx512bf16" in features() and processor()[0].startswith("znver")
    return AVX512_BF16 if pairs_are_fast else AVX512


def hint() -> str:
    """Return why AMX is not used, or "" if it is used or absent. Without AMX, bfloat16 is slow."""
    if not has_amx() or (amx_wanted() and amx_granted()):
        return ""
    return f"this processor has AMX, but {AMX_REFUSED if amx_wanted() else AMX_OFF}"


def has_amx() -> bool:
    return {"amx-bf16", "amx-tile", "avx512bf16", "avx512bw"} <= features()


def amx_wanted() -> bool:
    return os.environ.get(AMX_VARIABLE, "").lower() not in {"0", "off"}


@cache
def amx_granted() -> bool:
    """Request the tile registers from Linux for all threads, before any thread uses them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA)
    return answer == 0

"""The processor that LLVM compiles for, and how our microkernels use its registers."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba

from distgpt.core.cpu.compiling.registers import AMX, AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Shape

AMX_VARIABLE = "DISTGPT_AMX"
# On a Sapphire Rapids, 8 threads: gpt-mini trained and the tests of matmuls passed; attention's were not run.
AMX_HINT = f"{AMX_VARIABLE}=1 turns it on, for bfloat16 at 3.8 times the speed of vdpbf16ps, tried once"
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # the call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
_config: Any = numba.config
_binding: Any = llvm


@cache
def processor() -> tuple[str, str]:
    """Return name and features as LLVM gives them, or as NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
    name = _config.CPU_NAME or _binding.get_host_cpu_name()
    if (features := _config.CPU_FEATURES) is None:
        of_llvm = _binding.get_host_cpu_features().flatten()
        features = ",".join(filter(None, [of_llvm, *(f"+{name}" for name in unlisted_features())]))
    return name, features


@cache
def unlisted_features() -> list[str]:
    """List the features, by LLVM's names, that neither LLVM nor Numba finds: those of arm64."""
    if platform.machine().lower() not in ("arm64", "aarch64"):
        return []
    from distgpt.processors import arm

    return arm.features()


def features() -> set[str]:
    """Return the processor's features, by LLVM's names."""
    return {feature[1:] for feature in processor()[1].split(",") if feature.startswith("+")}


@cache
def shape() -> Shape:
    """Return how this processor's registers are used. Without AVX, LLVM splits the vectors itself."""
    if "neon" in features():
        return NEON_BF16 if "bf16" in features() else NEON
    if "avx512f" not in features():
        return AVX2
    if has_amx() and amx_wanted() and amx_granted():
        return AMX
    return AVX512_BF16 if multiplies_pairs_fast() else AVX512


def multiplies_pairs_fast() -> bool:
    """Return whether vdpbf16ps beats float32's multiply-adds: on AMD; Intel's has a quarter of the rate."""
    return "avx512bf16" in features() and processor()[0].startswith("znver")


def has_amx() -> bool:
    return {"amx-bf16", "amx-tile", "avx512bf16", "avx512bw"} <= features()


def amx_wanted() -> bool:
    return os.environ.get(AMX_VARIABLE) == "1"


@cache
def amx_granted() -> bool:
    """Ask Linux for the tile registers, for all threads of this process, before one of them uses any."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    granted: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA)
    return granted == 0

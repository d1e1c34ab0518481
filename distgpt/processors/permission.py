"""AMX is used where the processor has it and Linux grants it, unless the user turns it off."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

from distgpt.core.cpu.compiling.processor import Processor, Shape

SHAPE = Shape(lanes=16, vectors=2, rows=32, dot=True, amx=True)
VARIABLE = "DISTGPT_AMX"
# On a Sapphire Rapids, 8 threads, gpt-mini trained in bfloat16 3.8 times as fast as by vdpbf16ps.
OFF = f"{VARIABLE}=0 turns it off"
REFUSED = "Linux does not grant it: that takes version 5.16 or newer"
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # the call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def has_amx(features: set[str]) -> bool:
    return {"amx-bf16", "amx-tile", "avx512bf16", "avx512bw"} <= features


def wanted() -> bool:
    return os.environ.get(VARIABLE) != "0"


@cache
def granted() -> bool:
    """Ask Linux for the tile registers, for all threads of this process, before one of them uses any."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, _TILE_DATA)
    return answer == 0


def _shape(features: set[str]) -> Shape | None:
    return SHAPE if has_amx(features) and wanted() and granted() else None


def _hint(features: set[str]) -> str:
    refused = has_amx(features) and wanted() and not granted()
    return f"this processor has AMX, but {REFUSED}. Without it bfloat16 is slow" if refused else ""


AMX = Processor(_shape, _hint)

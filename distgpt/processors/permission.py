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
OFF = f"{VARIABLE} turns it off"
REFUSED = "Linux does not grant it: that takes version 5.16, and a container that lets it be asked for"
_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18  # the call, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def has_amx(features: set[str]) -> bool:
    return {"amx-bf16", "amx-tile", "avx512bf16", "avx512bw"} <= features


def wanted() -> bool:
    return os.environ.get(VARIABLE, "").lower() not in {"0", "off"}


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
    """Say why it is not used: without it, a processor that has it is slow in bfloat16."""
    if not has_amx(features) or (wanted() and granted()):
        return ""
    return f"this processor has AMX, but {REFUSED if wanted() else OFF}"


AMX = Processor(_shape, _hint)

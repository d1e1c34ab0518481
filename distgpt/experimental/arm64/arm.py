"""arm64: how registers are used, and the features that matter here, as the system reports them.

LLVM reads few of them on Linux and none on macOS, whose processors it knows by name only.
"""

from __future__ import annotations

import ctypes
import sys

from distgpt.core.base.system import sysctl_number
from distgpt.core.cpu.compiling.processor import Processor, Shape

NEON = Shape(lanes=4, vectors=4, rows=6, dot=False, neon=True)
NEON_BF16 = Shape(lanes=4, vectors=4, rows=6, dot=True, neon=True)

# By LLVM's names: the entry and bit of Linux's auxiliary vector, and the name on macOS.
_FEATURES = {
    "neon": (16, 1, "AdvSIMD"),
    "dotprod": (16, 20, "arm.FEAT_DotProd"),
    "bf16": (26, 14, "arm.FEAT_BF16"),
    "i8mm": (26, 13, "arm.FEAT_I8MM"),
}


def features() -> list[str]:
    """List those of this processor, which is one of arm64, by LLVM's names."""
    if sys.platform == "darwin":
        return [name for name, (*_, known) in _FEATURES.items() if sysctl_number(f"hw.optional.{known}")]
    ask = ctypes.CDLL(None).getauxval
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return [name for name, (entry, bit, _) in _FEATURES.items() if ask(entry) >> bit & 1]


ARM = Processor(lambda features: NEON_BF16 if "bf16" in features else NEON)

"""The features of an arm64 processor that matter here, as the system reports them.

LLVM reads few of them on Linux and none on macOS, whose processors it knows by name only.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# By LLVM's names: the number and bit of the auxiliary vector's entry on Linux, and the name on macOS.
_LINUX = {"neon": (16, 1), "dotprod": (16, 20), "bf16": (26, 14), "i8mm": (26, 13)}
_MACOS = {"dotprod": "FEAT_DotProd", "bf16": "FEAT_BF16", "i8mm": "FEAT_I8MM"}


def features() -> list[str]:
    """List those of this processor, by LLVM's names; none on other processors."""
    if platform.machine().lower() not in ("arm64", "aarch64"):
        return []
    system = ctypes.CDLL(None)
    if sys.platform == "linux":
        system.getauxval.restype, system.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return [name for name, (entry, bit) in _LINUX.items() if system.getauxval(entry) >> bit & 1]
    return ["neon", *(name for name, known in _MACOS.items() if _has(system, known))]


def _has(system: ctypes.CDLL, feature: str) -> bool:
    """Ask macOS for a feature; it is missing where the question fails."""
    found, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = f"hw.optional.arm.{feature}".encode()
    failed = system.sysctlbyname(name, ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0))
    return not failed and found.value == 1

"""Facts that macOS reports about the machine, as it has no /proc."""

from __future__ import annotations

import ctypes
import sys


def sysctl(name: str) -> bytes:
    """Return a value of macOS by its name; empty on other systems and for unknown names."""
    if sys.platform != "darwin":
        return b""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def sysctl_text(name: str) -> str:
    return sysctl(name).rstrip(b"\0").decode(errors="replace")


def sysctl_number(name: str) -> int:
    """Return an integer value; 0 where there is none."""
    return int.from_bytes(sysctl(name), "little")

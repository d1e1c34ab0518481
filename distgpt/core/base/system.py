"""Facts about the machine: from /proc on Linux, from sysctl on macOS."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[2]


def python(*words: object) -> list[str]:
    """Return a command line for this Python, which does not import from the working directory."""
    return [sys.executable, "-P", *map(str, words)]


def python_code(code: str) -> list[str]:
    """Return a command line that runs code in another process with this process's module path."""
    path = [*filter(None, map(str, sys.path)), str(PACKAGE.parent)]
    return python("-c", f"import sys; sys.path[:] = {path!r}; {code}")


def sysctl(name: str) -> bytes:
    """Return a macOS sysctl value by name; empty on other systems and for unknown names."""
    if sys.platform != "darwin":
        return b""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def sysctl_text(name: str) -> str:
    return sysctl(name).rstrip(b"\0").decode(errors="replace")


def sysctl_number(name: str) -> int:
    """Return an integer value; 0 if there is none."""
    return int.from_bytes(sysctl(name), "little")


def boot_id() -> str:
    """Return an id that changes at each boot; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return sysctl_text("kern.bootsessionuuid")

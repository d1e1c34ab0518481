"""Compile CUDA sources for the host's processor, with g++ and a header that replaces CUDA's."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

_SHIM = Path(__file__).resolve().parent / "shim"
_HEADERS = [_SHIM / name for name in ("cuda.h", "fibers.h", "launch.h")]
COMPILER = shutil.which("g++")

# -Og: kernels are compiled more often than they run. -O1 takes 33% longer to compile, -O0 runs half as fast.
# Undefined behavior ends a kernel with the file and line.
_CHECKS = "alignment,null,bounds,shift,integer-divide-by-zero,signed-integer-overflow"
_FLAGS = f"-std=c++17 -Og -fPIC -ffp-contract=off -fno-exceptions -fno-rtti -fno-gnu-unique -fsanitize={_CHECKS}"
_FLAGS += " -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi"
_KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\(\(noinline, used\)\)\s+void\s+(\w+)')
_ENTRY = """
extern "C" __attribute__((visibility("default"))) const char* signature_{0}() {{
    return shim::signature(&{0});
}}
extern "C" __attribute__((visibility("default"))) const char* launch_{0}(
    const unsigned* grid, const unsigned* block, size_t shared, long long order, void** args) {{
    return shim::launch(&{0}, grid, block, shared, order, args);
}}
"""
_STACKS = """
extern "C" __attribute__((visibility("default"))) unsigned char* share_stacks(unsigned char* of_others) {
    return fibers::share_stacks(of_others);
}
"""


class BuildError(Exception):
    """A compilation error, with the message of g++."""


class Program:
    """A compiled source. Types of parameters are letters: "*f" is a pointer to float."""

    stacks: int | None = None  # thread stacks, shared by all sources, since each needs two memory maps

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        share = self._library.share_stacks
        share.argtypes, share.restype = [ctypes.c_void_p], ctypes.c_void_p
        Program.stacks = share(Program.stacks)
        self._entries: dict[str, tuple[list[str], ctypes._CFuncPtr]] = {}

    def entry(self, kernel: str) -> tuple[list[str], ctypes._CFuncPtr]:
        """Return a kernel's parameter types and launch function; raise AttributeError if it does not exist."""
        if kernel not in self._entries:
            signature = self._library[f"signature_{kernel}"]
            signature.restype = ctypes.c_char_p
            launch = self._library[f"launch_{kernel}"]
            launch.restype = ctypes.c_char_p
            pointer = ctypes.c_void_p
            launch.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_longlong, pointer]
            self._entries[kernel] = (signature().decode().split(), launch)
        return self._entries[kernel]


def build(text: str, defines: Sequence[str] = ()) -> Program:
    """Compile a source's text, or load it from the cache."""
    flags = [*_FLAGS.split(), *(f"-D{define}" for define in defines)]
    parts = [text, *flags, *(path.read_text() for path in _HEADERS), _ENTRY, _STACKS]
    return Program(cached(parts, lambda library: _compile(text, flags, library)))


def cached(parts: Sequence[str], make: Callable[[Path], object]) -> Path:
    """Return the cached library of these parts, or make it."""
    assert COMPILER, "needs g++"
    key = hashlib.sha256("\0".join([*parts, _version()]).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"distgpt-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:  # another worker may make it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                unfinished = library.with_suffix(f".{os.getpid()}")
                make(unfinished)
                unfinished.replace(library)
    return library


def _compile(text: str, flags: list[str], library: Path) -> None:
    shim = f'#include "{_HEADERS[0]}"\n'
    expanded = _run([*flags, "-E", "-x", "c++", "-"], shim + text)
    entries = "".join(_ENTRY.format(name) for name in dict.fromkeys(_KERNEL.findall(expanded)))
    link = ["-shared", "-Wl,-z,now,-z,defs", "-x", "c++-cpp-output", "-", "-o", str(library), "-lm"]
    _run([*flags, *link], expanded + entries + _STACKS)


def _run(arguments: list[str], text: str) -> str:
    result = subprocess.run([COMPILER, *arguments], input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(result.stderr)
    if result.stderr:
        warnings.warn(result.stderr, stacklevel=4)
    return result.stdout


@cache
def _version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout

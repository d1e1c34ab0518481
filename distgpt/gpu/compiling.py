"""Compiles CUDA sources with NVRTC and caches the machine code on disk. Needs neither a driver nor a GPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.caches import cache_folder, compute_once
from distgpt.core.base.errors import UsageError
from distgpt.gpu import probe
from distgpt.gpu.probe import library_path

FOLDER = Path(__file__).resolve().parent / "cu"

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"\s*')
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
Kind = tuple[str, tuple[str, ...]]  # a source and its macros
TUNE_ANEW = "DISTGPT_TUNE_ANEW"  # 1: ignore stored timings, and store new ones


class CompileError(RuntimeError):
    """An NVRTC failure. The message contains its log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    report: str  # the compiler's warnings, and the resource usage of each kernel from ptxas


# -- the sources


def source_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@cache
def source_text(source: str) -> str:
    """Return gpu/cu/`source`.cu with its includes inlined, so that it needs no include path."""
    return "".join(_lines(f"{source}.cu", set()))


def storage_define(type: str) -> str:
    """Return the macro for kernels that store "bfloat16", "float32" or "float64"."""
    return f"STORAGE_{type.upper()}"


def options(defines: Iterable[str]) -> list[str]:
    """Return NVRTC's options. Division and square root stay exact, since they limit no kernel's speed."""
    return ["-std=c++17", *(f"-D{define}" for define in defines)]


def _lines(file: str, included: set[str]) -> Iterable[str]:
    included.add(file)
    yield f'#line 1 "{file}"\n'
    for number, line in enumerate((FOLDER / file).read_text("utf-8").splitlines(), 1):
        include = _INCLUDE.fullmatch(line)
        if include and include[1] not in included:
            yield from _lines(include[1], included)
            yield f'#line {number + 1} "{file}"\n'
        else:
            yield "\n" if include or line.strip() == "#pragma once" else f"{line}\n"


# -- the compiler


def available() -> bool:
    return load_nvrtc() is not None


@cache
def nvrtc_version() -> str:
    nvrtc, parts = load_nvrtc(), (ctypes.c_int(), ctypes.c_int())
    if nvrtc is not None:
        nvrtc.nvrtcVersion(*map(ctypes.byref, parts))
    return ".".join(str(part.value) for part in parts)


def compile_source(source: str, defines: Iterable[str], arch: str) -> Compiled:
    """Compile gpu/cu/`source`.cu for one architecture, such as "sm_90"."""
    return compile_text(source_text(source), f"{source}.cu", defines, arch)


def compile_text(text: str, name: str, defines: Iterable[str], arch: str) -> Compiled:
    """Compile source text. `name` is used in messages."""
    nvrtc = load_nvrtc()
    if nvrtc is None:
        raise UsageError("CUDA kernels require NVRTC: pip install nvidia-cuda-nvrtc, or a CUDA toolkit")
    flags = [*options(defines), f"--gpu-architecture={arch}", "--ptxas-options=-v"]
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), name)
    try:
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), encoded)
        report = _fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if status:
            raise CompileError(f"{name} with {' '.join(flags)}:\n{report}")
        return Compiled(_fetch(program, "CUBIN"), report)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def load_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC, after its built-in headers, which some of its wheels do not find."""
    if (file := library_path(_LIBRARIES)) is not None:
        for headers in file.parent.glob("libnvrtc-builtins.so.*"):
            with suppress(OSError):
                ctypes.CDLL(str(headers))
    return probe.load_library(_LIBRARIES)


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc, size = load_nvrtc(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _check(status: int, what: str) -> None:
    if status:
        raise CompileError(f"NVRTC failed with status {status} for {what}")


# -- the cache: compiling takes seconds


def cubin(source: str, defines: tuple[str, ...], arch: str) -> bytes:
    """Return the machine code of gpu/cu/`source`.cu for an architecture such as "sm_90", cached on disk.

    Only one rank per node compiles it.
    """
    folder = cache_folder("kernels")
    path = folder and folder / f"{source}-{arch}-{_digest(source, defines, arch)}.cubin"
    return compute_once(path, lambda: compile_source(source, defines, arch).cubin)


def _digest(source: str, defines: tuple[str, ...], arch: str) -> str:
    """Hash everything that affects the result, including the compiler's version."""
    parts = (source_text(source), *options(defines), arch, nvrtc_version())
    return sha256("\0".join(parts).encode()).hexdigest()[:24]


class TuningCache:
    """Stored choices, one file each, valid for identical GPUs with the same libraries and distgpt code.

    One rank per node makes a choice, and the others use it. `facts`: everything that choices depend on. If
    None, nothing is stored.
    """

    def __init__(self, facts: Sequence[object] | None) -> None:
        self._folder = None if facts is None else cache_folder("kernels")
        self._facts = [*(facts or ()), _code()]

    def choice(self, what: str, accepts: Callable[[bytes], bool], make: Callable[[], bytes]) -> bytes:
        """Return the choice for `what`: the stored one if `accepts` allows it, otherwise a new one."""
        if self._folder is None:
            return make()
        key = sha256(repr([what, *self._facts]).encode()).hexdigest()[:24]
        anew = os.environ.get(TUNE_ANEW) == "1"
        return compute_once(self._folder / f"{key}.choice", make, (lambda kept: False) if anew else accepts)


@cache
def _code() -> str:
    """Return a checksum of the code to which choices apply."""
    content = (file.read_bytes() for file in sorted((*FOLDER.parent.glob("*.py"), *FOLDER.glob("*"))))
    return sha256(b"\0".join(content)).hexdigest()

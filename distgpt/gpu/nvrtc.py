"""CUDA sources to machine code through NVRTC alone: no driver and no GPU are needed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from distgpt.errors import UsageError
from distgpt.gpu import libraries, sources

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    report: str  # the compiler's warnings, and what each kernel uses in ptxas' words


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes: registers per thread, the rest in bytes. `stack` and spills are slow memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # without dynamic shared memory


class CompileError(RuntimeError):
    """NVRTC refused a source of ours, or itself failed; the message holds its log."""


def available() -> bool:
    return _library() is not None


@cache
def version() -> str:
    """Of the library that compiles."""
    nvrtc, numbers = _library(), (ctypes.c_int(), ctypes.c_int())
    if nvrtc is not None:
        nvrtc.nvrtcVersion(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def compile_cubin(source: str, defines: Iterable[str], arch: str) -> Compiled:
    """gpu/cu/`source`.cu for one architecture, "sm_90" for example."""
    return compile_text(sources.text(source), f"{source}.cu", defines, arch)


def compile_text(text: str, name: str, defines: Iterable[str], arch: str) -> Compiled:
    """The same for any text; `name` is for messages."""
    nvrtc = _library()
    if nvrtc is None:
        raise UsageError("CUDA kernels need NVRTC: pip install nvidia-cuda-nvrtc, or a CUDA toolkit")
    options = [*sources.options(defines), f"--gpu-architecture={arch}", "--ptxas-options=-v"]
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), name)
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        report = _fetch(program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if status:
            raise CompileError(f"{name} with {' '.join(options)}:\n{report}")
        return Compiled(_fetch(program, "CUBIN"), report)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def resources(report: str) -> dict[str, Resources]:
    """By kernel, from a report of ptxas."""
    _, *parts = _ENTRY.split(report)
    return {kernel: _resources(part) for kernel, part in zip(parts[::2], parts[1::2], strict=True)}


def _resources(part: str) -> Resources:
    def number(pattern: str) -> int:  # the most, as functions that are called are listed with their kernel
        return max(map(int, re.findall(rf"(\d+) {pattern}", part)), default=0)

    return Resources(
        registers=number("registers"),
        stack=number("bytes stack frame"),
        spill_stores=number("bytes spill stores"),
        spill_loads=number("bytes spill loads"),
        shared=number("bytes smem"),
    )


@cache
def _library() -> ctypes.CDLL | None:
    return libraries.find(_LIBRARIES)


def _fetch(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc = _library()
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _check(status: int, what: str) -> None:
    if status:
        raise CompileError(f"NVRTC failed with status {status} for {what}")

"""Compiled kernels, kept on disk: compiling takes seconds, reading what was compiled does not."""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from distgpt.errors import StorageError
from distgpt.files import atomic_file
from distgpt.gpu import nvrtc, sources


def cubin(source: str, defines: tuple[str, ...], arch: str) -> bytes:
    """Machine code of gpu/cu/`source`.cu for "sm_90" or the like."""
    path = _folder() / f"{source}-{arch}-{_digest(source, defines, arch)}.cubin"
    if (kept := _kept(path)) is not None:
        return kept
    code = nvrtc.compile_cubin(source, defines, arch).cubin
    # Without a place to keep it, it is compiled anew the next time.
    with suppress(OSError, StorageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(sha256(code).digest() + code)
    return code


def _kept(path: Path) -> bytes | None:
    """What was kept, unless it is damaged: a driver would refuse that, or worse, run it."""
    try:
        checksum, code = (content := path.read_bytes())[:32], content[32:]
    except OSError:
        return None
    return code if sha256(code).digest() == checksum else None


def _digest(source: str, defines: tuple[str, ...], arch: str) -> str:
    """Of all that decides what comes out, the compiler's version included."""
    parts = (sources.text(source), *sources.options(defines), arch, nvrtc.version())
    return sha256("\0".join(parts).encode()).hexdigest()[:24]


def _folder() -> Path:
    """$XDG_CACHE_HOME/distgpt or ~/.cache/distgpt."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base, "distgpt", "kernels")

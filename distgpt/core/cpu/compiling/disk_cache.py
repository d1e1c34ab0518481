"""A disk cache of compiled loops: the site's read-only cache first, then the user's.

If multiple processes need a loop, one compiles it and the others wait. After a disk error the loops are
compiled again, and the run continues.
"""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler import CompileResult
from numba.core.cpu import CPUContext
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.types import Type

from distgpt.core.base.caches import (
    alone,
    cache_folder,
    cache_limit,
    compute_once,
    keep,
    own_folders,
    read_checked,
    read_trusted,
)
from distgpt.core.base.errors import StorageError
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling.processor import processor, shape

PACKAGE = Path(__file__).parents[3]
# The site's loops are in one file per kind of processor, so that a cluster node reads them in one operation.
# `distgpt compile` writes it (measure/site_cache.py); users only read it.
SITE = PACKAGE / "compiled"
# Files of loops and of the constants they use: Numba freezes the values of globals.
LOOPS = "core/cpu/*/*.py", "core/cpu/pool.py", "core/ops/*.py", "**/loops/*.py", "inference/quantized/*.py"
MADE_BY = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)

Missing = tuple[FunctionType, tuple[Type, ...]]  # a loop and its argument types

used: set[str] = set()  # names of all loops that this process has read or kept
# If set, calls of loops that are not compiled yet are recorded here, and these loops do not run.
noted: ContextVar[dict[Missing, None] | None] = ContextVar("noted", default=None)
_full: list[Path] = []  # the user's directory once it is full


@cache
def folder() -> Path | None:
    """Return the user's directory for loops of these sources, or None if no private directory is writable."""
    cache_limit()  # rejects an invalid size here, on all ranks
    return cache_folder(folder_name(), beside())


@cache
def folder_name() -> str:
    """Return the directory name of these loops.

    Loops depend on the tile size. AMX changes it without changing the processor name in the file names.
    """
    return f"loops-{digest(sources())}{'-amx' * shape().amx}"


def beside() -> Path:
    """Return the location to try before the user's cache if DISTGPT_CACHE is not set."""
    requested = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    return Path(requested).absolute() if requested else Path(__file__).parent / "__pycache__"


def site_path() -> Path:
    """Return the file of the site's loops for this processor and these sources. It may not exist."""
    name, features = processor()
    kind = digest_of(features.encode(), *[b"amx"] * shape().amx)[:8]
    about = re.sub(r"[^\w.]+", "-", f"{name}-{sys.implementation.cache_tag}-{kind}")
    return SITE / f"{about}-{digest(sources())}.loops"


@cache
def site() -> dict[str, bytes]:
    """Return the site's loops by name; empty if the file is missing, corrupt or not trusted.

    Loops are executable code. Their file must therefore belong to root, this user or the package's owner, and
    must not be writable by others.
    """
    path = site_path()
    content = read_trusted(path, {0, os.geteuid(), PACKAGE.stat().st_uid})
    if content is None or site_digest(path, content[32:]) != content[:32]:
        return {}
    files: dict[str, bytes] = pickle.loads(content[32:])
    return files


def site_digest(path: Path, content: bytes) -> bytes:
    """Return the digest before the content. It covers the name, so that one file cannot replace another."""
    return sha256(path.name.encode() + b"\0" + content).digest()


def sources() -> list[Path]:
    """Return all sources: a loop contains a copy of every helper that it calls, from any file."""
    return sorted({path for pattern in LOOPS for path in PACKAGE.glob(pattern)})


def digest(paths: Iterable[Path]) -> str:
    """Return a digest of these files and of the compiler versions."""
    return digest_of(repr(MADE_BY).encode(), *(path.read_bytes() for path in paths))


def digest_of(*texts: bytes) -> str:
    return sha256(b"\0".join(texts)).hexdigest()[:16]


def read(name: str) -> bytes | None:
    """Return the cached content from the site or the user, or None."""
    used.add(name)
    return _find(name)


def _find(name: str) -> bytes | None:
    if (result := site().get(name)) is not None:
        return result
    own = folder()  # only created here: users of a site's cache may not have one
    if own and (content := read_checked(own / name)) is not None:
        return content
    others = (read_checked(other / name) for other in _own_folders() if other != own)
    return next((content for content in others if content is not None), None)


@cache
def _own_folders() -> list[Path]:
    """List the user's directories, including full and read-only ones."""
    return own_folders(folder_name(), beside())


def read_or_make(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the cached content; make and keep it if it is missing."""
    if (result := read(name)) is not None:
        return result
    own = folder()
    return compute_once(own / name if own else None, make)


def _keep(name: str, content: bytes, not_kept: Callable[[], None]) -> None:
    """Keep the content under this name, unless the disk is full."""
    own = folder()
    if own is None or own in _full:
        return
    try:
        keep(own / name, content)
    except StorageError as error:
        not_kept()  # release the waiting processes
        _full.append(own)
        first_use.note(f"{error}; compiled loops are not kept")


def keep_on_disk(compiled: Any) -> None:
    """Attach this cache to a loop compiled by Numba."""
    compiled._cache = kept = _Cache(compiled.py_func)
    compiled.compile = kept.by_turns(compiled.compile)


class _Cache(NullCache):  # type: ignore[misc]
    """The cache of a loop's machine code, one checksummed file per combination of argument types.

    Numba's own cache has no checksums, and ranks that compile concurrently overwrite each other's index. A
    process holds the lock from the cache miss until `compile` returns. In the meantime it compiles the loops
    that this one calls, under their own locks. Calls have no cycles, so processes cannot deadlock.
    """

    def __init__(self, loop: FunctionType) -> None:
        self._loop = loop
        self._turn = ExitStack()
        self._not_kept: Callable[[], None] = lambda: None

    def by_turns(self, compile: Callable[..., object]) -> Callable[..., object]:
        @wraps(compile)
        def compiled(types: tuple[Type, ...]) -> object:
            if (missing := noted.get()) is not None:
                if _find(self._name(types, cpu_target.target_context.codegen())) is None:
                    missing[self._loop, types] = None
                return _not_run
            with self._turn:
                return compile(types)

        return compiled

    def _name(self, types: tuple[Type, ...], codegen: JITCPUCodegen) -> str:
        source = _digest_of_file(inspect.getfile(self._loop))  # tests and tokenizers also have loops
        about = (self._loop.__module__, source, self._loop.__code__.co_code, types, codegen.magic_tuple())
        name = f"{self._loop.__qualname__}-{self._loop.__code__.co_firstlineno}"
        return f"{name}-{digest_of(repr(about).encode())}.loop"

    def load_overload(self, sig: tuple[Type, ...], target_context: CPUContext) -> CompileResult | None:
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        self._not_kept = lambda: None  # the previous callback has a closed descriptor
        if (content := read(name)) is None:
            first_use.report(is_kept=folder() is not None)
            if own := folder():
                self._not_kept = self._turn.enter_context(alone(own / name))
            content = read(name)
        if content is None:
            return None
        with suppress(Exception):  # names may be missing in this process
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        return None

    def save_overload(self, sig: tuple[Type, ...], data: CompileResult) -> None:
        # Code with addresses of this process is not valid in another (as in Numba's cache).
        if data.lifted or data.library.has_dynamic_globals:
            self._not_kept()
        else:
            _keep(self._name(sig, data.codegen), dumps(data._reduce()), self._not_kept)


def _not_run(*arguments: object) -> None: ...


@cache
def _digest_of_file(path: str) -> str:
    return digest([Path(path)])

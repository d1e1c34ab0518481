"""Keep compiled loops on disk between starts: the site's, which are read only, then the user's own.

Of processes that start at once, one compiles a loop and the others wait for it. A disk error ends no run: the
loops are compiled again.
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
    keep,
    made_by_one,
    own_folders,
    read_checked,
    read_trusted,
)
from distgpt.core.base.errors import StorageError
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling.processor import processor, shape

PACKAGE = Path(__file__).parents[3]
# The site's loops: one file for each kind of processor, as a node of a cluster reads it in one go. `distgpt
# compile` writes it (measure/site_cache.py), users only read it.
SITE = PACKAGE / "compiled"
# Files of loops, and of the constants in them: Numba freezes what it finds under a global name.
LOOPS = "core/cpu/*/*.py", "core/cpu/pool.py", "core/ops/*.py", "**/loops/*.py", "inference/quantized/*.py"
MADE_BY = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)

Missing = tuple[FunctionType, tuple[Type, ...]]  # a loop, and the types of its arguments

used: set[str] = set()  # names of all that this process has read or kept
# Where it is set, loops that nobody has compiled are noted there when they are called, and none runs.
noted: ContextVar[dict[Missing, None] | None] = ContextVar("noted", default=None)
_full: list[Path] = []  # the user's folder, if it takes no more


@cache
def folder() -> Path | None:
    """Return the user's folder for loops of these sources; None if there is no private place to write to."""
    cache_limit()  # refused here if it is no size, on all ranks
    return cache_folder(folder_name(), beside())


@cache
def folder_name() -> str:
    """Return the name of a folder of these loops.

    Loops hold the size of a tile. AMX changes it without a change of the processor, which is in their names.
    """
    return f"loops-{digest(sources())}{'-amx' * shape().amx}"


def beside() -> Path:
    """Return the place before the user's cache, where DISTGPT_CACHE names no other."""
    requested = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    return Path(requested).absolute() if requested else Path(__file__).parent / "__pycache__"


def site_path() -> Path:
    """Return the file of the site's loops for this processor and these sources; it may be missing."""
    name, features = processor()
    kind = digest_of(features.encode(), *[b"amx"] * shape().amx)[:8]
    about = re.sub(r"[^\w.]+", "-", f"{name}-{sys.implementation.cache_tag}-{kind}")
    return SITE / f"{about}-{digest(sources())}.loops"


@cache
def site() -> dict[str, bytes]:
    """Return the site's loops by name; none if there is no file, or one that is damaged or not to be trusted.

    Loops are run. So their file must be of root, of this user, or of whoever owns the package, whose code is
    run anyway, and nobody else may write to it.
    """
    path = site_path()
    content = read_trusted(path, {0, os.geteuid(), PACKAGE.stat().st_uid})
    if content is None or site_digest(path, content[32:]) != content[:32]:
        return {}
    files: dict[str, bytes] = pickle.loads(content[32:])
    return files


def site_digest(path: Path, content: bytes) -> bytes:
    """Return the digest before the content: of the name too, or one file could stand for another."""
    return sha256(path.name.encode() + b"\0" + content).digest()


def sources() -> list[Path]:
    """Return all sources: a loop holds a copy of every helper that it calls, whichever file that is in."""
    return sorted({path for pattern in LOOPS for path in PACKAGE.glob(pattern)})


def digest(paths: Iterable[Path]) -> str:
    """Return a digest of files, and of the versions of what compiles them."""
    return digest_of(repr(MADE_BY).encode(), *(path.read_bytes() for path in paths))


def digest_of(*texts: bytes) -> str:
    return sha256(b"\0".join(texts)).hexdigest()[:16]


def read(name: str) -> bytes | None:
    """Return what is kept under this name: the site's, else the user's own; None if nobody has kept it."""
    used.add(name)
    return _find(name)


def _find(name: str) -> bytes | None:
    if (found := site().get(name)) is not None:
        return found
    own = folder()  # made only now: a user of a site's cache need not have one
    if own and (content := read_checked(own / name)) is not None:
        return content
    others = (read_checked(other / name) for other in _own_folders() if other != own)
    return next((content for content in others if content is not None), None)


@cache
def _own_folders() -> list[Path]:
    """List those that are full, or on a disk that is read-only, too."""
    return own_folders(folder_name(), beside())


def read_or_make(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what is kept under this name. Make and keep it if need be."""
    if (found := read(name)) is not None:
        return found
    own = folder()
    return made_by_one(own / name if own else None, make)


def _keep(name: str, content: bytes, not_kept: Callable[[], None]) -> None:
    """Keep this under its name, unless the disk is full."""
    own = folder()
    if own is None or own in _full:
        return
    try:
        keep(own / name, content)
    except StorageError as error:
        not_kept()  # where the others wait for it
        _full.append(own)
        first_use.note(f"{error}; compiled loops are not kept")


def keep_on_disk(compiled: Any) -> None:
    """Give a loop, as Numba has made it, its cache."""
    compiled._cache = kept = _Cache(compiled.py_func)
    compiled.compile = kept.by_turns(compiled.compile)


class _Cache(NullCache):  # type: ignore[misc]
    """A loop's machine code, a file for each type of its arguments, behind a checksum.

    Numba's own files have none, and an index that ranks which compile at once overwrite for each other. A
    process has its turn from where it finds no file to where `compile` returns; loops that this one calls are
    compiled meanwhile, in turns of their own. They form no circle, so no two processes wait for each other.
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
        source = _digest_of_file(inspect.getfile(self._loop))  # tests and tokenizers have loops, too
        about = (self._loop.__module__, source, self._loop.__code__.co_code, types, codegen.magic_tuple())
        name = f"{self._loop.__qualname__}-{self._loop.__code__.co_firstlineno}"
        return f"{name}-{digest_of(repr(about).encode())}.loop"

    def load_overload(self, sig: tuple[Type, ...], target_context: CPUContext) -> CompileResult | None:
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        self._not_kept = lambda: None  # that of an earlier turn has a descriptor that is closed
        if (content := read(name)) is None:
            first_use.report(is_kept=folder() is not None)
            if own := folder():
                self._not_kept = self._turn.enter_context(alone(own / name))
            content = read(name)
        if content is None:
            return None
        with suppress(Exception):  # of code that names what this process lacks: it is compiled anew
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        return None

    def save_overload(self, sig: tuple[Type, ...], data: CompileResult) -> None:
        # As Numba does: what holds addresses of this process is not for another one.
        if data.lifted or data.library.has_dynamic_globals:
            self._not_kept()
        else:
            _keep(self._name(sig, data.codegen), dumps(data._reduce()), self._not_kept)


def _not_run(*arguments: object) -> None: ...


@cache
def _digest_of_file(path: str) -> str:
    return digest([Path(path)])

"""Keep compiled loops on disk between starts: the site's, which are read only, then the user's own.

A disk error ends no run: the loops are compiled again.
"""

from __future__ import annotations

import inspect
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Protocol

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.codegen import JITCPUCodegen
from numba.core.compiler import CompileResult
from numba.core.cpu import CPUContext
from numba.core.serialize import dumps
from numba.core.types import Type

from distgpt.core.base.caches import cache_folder, made_once, read_checked, write_checked
from distgpt.core.base.errors import StorageError
from distgpt.core.base.tables import paths_in
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling import site_cache
from distgpt.core.cpu.compiling.processor import processor, shape, unlisted_features

PACKAGE = Path(__file__).parents[3]
# Files of loops, and of the constants in them: Numba freezes what it finds under a global name.
CORE = "core/cpu/*/*.py", "core/cpu/pool.py", "core/ops/*.py"
MADE_BY = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)
VERSIONS = 3  # of the sources whose compiled loops stay
OURS = re.compile(r"loops-[0-9a-f]{16}(-.*)?")  # NUMBA_CACHE_DIR may hold folders of others

used: set[str] = set()  # names of all that this process has read or kept


@cache
def folder() -> Path | None:
    """Return the user's folder for loops of these sources; None if there is no private place to write to.

    Loops hold the size of a tile. AMX changes it without a change of the processor, which is in their names;
    of arm64's features Numba knows few.
    """
    name = "-".join([f"loops-{digest(sources())}", *_kind()])
    requested = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    found = cache_folder(name, Path(requested) if requested else Path(__file__).parent / "__pycache__")
    if found is not None:
        _drop_old(found)
    return found


@cache
def site() -> site_cache.Site:
    """Return the site's loops for this processor, these sources and versions; it may hold none."""
    name, features = processor()
    kind = digest_of(features.encode(), *(word.encode() for word in _kind()))[:8]
    return site_cache.Site(f"{name}-{sys.implementation.cache_tag}-{kind}", digest(sources()))


def _kind() -> list[str]:
    return [*["amx"] * shape().amx, *unlisted_features()]


def sources() -> list[Path]:
    """Return all sources: a loop holds a copy of every helper that it calls, whichever file that is in."""
    of_components = (f"{folder}/*.py" for folder in paths_in("loops").values())
    return sorted(path for pattern in (*CORE, *of_components) for path in PACKAGE.glob(pattern))


def digest(paths: Iterable[Path]) -> str:
    """Return a digest of files, and of the versions of what compiles them."""
    return digest_of(repr(MADE_BY).encode(), *(path.read_bytes() for path in paths))


def digest_of(*texts: bytes) -> str:
    return sha256(b"\0".join(texts)).hexdigest()[:16]


def _drop_old(found: Path) -> None:
    with suppress(OSError):
        others = [path for path in found.parent.iterdir() if OURS.fullmatch(path.name) and path != found]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)


def read(name: str) -> bytes | None:
    """Return what is kept under this name: the site's, else the user's own; None if nobody has kept it."""
    used.add(name)
    if (found := site().files.get(name)) is not None:
        return found
    own = folder()  # made only now: a user of a site's cache need not have one
    return read_checked(own / name) if own else None


def read_or_make(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what is kept under this name. Make and keep it if need be."""
    used.add(name)
    if (found := site().files.get(name)) is not None:
        return found
    own = folder()
    return made_once(own and own / name, make)


def share() -> Path:
    """Move all that this process has used to the site's cache, too. Return the file that holds it now."""
    files = {name: content for name in sorted(used) if (content := read(name)) is not None}
    if files.keys() != used:
        raise StorageError(f"compiled loops cannot be kept in {folder()}: is the disk full?")
    files = {**site().files, **files}
    path = site().write(files)
    if site().files.keys() != files.keys():
        raise StorageError(f"{path} was not read back whole, or others may write to its folder")
    if own := folder():
        for name in files:
            (own / name).unlink(missing_ok=True)
    return path


class Compiled(Protocol):
    """A loop as Numba has made it."""

    py_func: FunctionType
    _cache: NullCache


def keep_on_disk(compiled: Compiled) -> None:
    """Give a loop its cache."""
    compiled._cache = _Cache(compiled.py_func)


class _Cache(NullCache):  # type: ignore[misc]
    """A loop's machine code, a file for each type of its arguments, behind a checksum.

    Numba's own files have none, and an index that ranks which compile at once overwrite for each other.
    """

    def __init__(self, loop: FunctionType) -> None:
        self._loop = loop

    def _name(self, types: tuple[Type, ...], codegen: JITCPUCodegen) -> str:
        source = _digest_of_file(inspect.getfile(self._loop))  # tests and tokenizers have loops, too
        about = (self._loop.__module__, source, self._loop.__code__.co_code, types, codegen.magic_tuple())
        name = f"{self._loop.__qualname__}-{self._loop.__code__.co_firstlineno}"
        return f"{name}-{digest_of(repr(about).encode())}.loop"

    def load_overload(self, sig: tuple[Type, ...], target_context: CPUContext) -> CompileResult | None:
        target_context.refresh()
        content = read(self._name(sig, target_context.codegen()))
        if content is None:
            first_use.report(is_kept=folder() is not None)
            return None
        with suppress(Exception):  # of code that names what this process lacks: it is compiled anew
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        return None

    def save_overload(self, sig: tuple[Type, ...], data: CompileResult) -> None:
        # As Numba does: what holds addresses of this process is not for another one.
        is_portable = not data.lifted and not data.library.has_dynamic_globals
        if is_portable and (own := folder()):
            with suppress(StorageError):
                write_checked(own / self._name(sig, data.codegen), dumps(data._reduce()))


@cache
def _digest_of_file(path: str) -> str:
    return digest([Path(path)])

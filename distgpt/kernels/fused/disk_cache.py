"""Keep compiled loops on disk between starts. A disk error ends no run: the loops are compiled again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

from distgpt.files import cache_folder
from distgpt.kernels.matmul import arm
from distgpt.kernels.matmul.processor import shape

config: Any = numba.config
KERNELS = Path(__file__).parent.parent
# Of loops, and of the constants in them: Numba freezes what it finds under a global name.
FOLDERS, FILES = ("fused", "matmul", "decoding"), ("api.py", "low_precision.py", "pool.py")
COMPILING = "compiling kernels, for the first time only: about 20 s"
VERSIONS = 3  # of the sources whose compiled loops stay


@cache
def folder() -> Path | None:
    """Return the folder for loops of these sources; None if this user has no private place to write to.

    Loops hold the size of a tile. AMX changes it without a change of the processor, the part Numba checks;
    of arm64's features Numba knows few.
    """
    name = "-".join([f"loops-{digest(sources())}", *["amx"] * shape().amx, *arm.features()])
    requested = config.CACHE_DIR  # NUMBA_CACHE_DIR
    found = cache_folder(name, Path(requested) if requested else KERNELS / FOLDERS[0] / "__pycache__")
    if found is not None:
        _drop_old(found)
    return found


def sources() -> list[Path]:
    """Return all sources: a loop holds a copy of every helper that it calls, whichever file that is in."""
    loops = (path for folder in FOLDERS for path in sorted((KERNELS / folder).glob("*.py")))
    return [*loops, *(KERNELS / name for name in FILES)]


def digest(paths: Iterable[Path]) -> str:
    texts = b"\0".join(path.read_bytes() for path in paths)
    return sha256(texts).hexdigest()[:16]


def _drop_old(found: Path) -> None:
    with suppress(OSError):
        others = {path.stat().st_mtime: path for path in found.parent.glob("loops-*") if path != found}
        for written in sorted(others)[: 1 - VERSIONS]:
            shutil.rmtree(others[written], ignore_errors=True)


def keep_on_disk(compiled: Any) -> None:
    """Give a loop its cache. Numba asks for a folder when a cache is made, and then no more."""
    place = folder()
    if place is None:
        return
    requested, config.CACHE_DIR = config.CACHE_DIR, str(place)
    try:
        with suppress(RuntimeError):  # the folder is gone again
            compiled._cache = _Cache(compiled.py_func)
    finally:
        config.CACHE_DIR = requested


_waiting: list[Callable[[str], None]] = []  # functions to call when a loop has to be compiled


def announce(say: Callable[[str], None]) -> None:
    """Call `say` once, when the first loop has to be compiled because no earlier run has left it."""
    _waiting[:] = [say]


class _Cache(FunctionCache):
    """Numba's cache, but a damaged file counts as missing and a full disk is no error."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        with suppress(Exception):
            found = super().load_overload(sig, target_context)
        while found is None and _waiting:
            with suppress(OSError, ValueError):  # of a stream that was closed
                _waiting.pop()(COMPILING)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            return
        except Exception:  # a damaged index, which saving reads first
            with suppress(OSError):
                self.flush()
                super().save_overload(sig, data)

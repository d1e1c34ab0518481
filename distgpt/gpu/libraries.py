"""Finding NVIDIA's libraries: those in use already, in PyPI's wheels, in a CUDA toolkit, or the system's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path


def find(names: Sequence[str]) -> ctypes.CDLL | None:
    """The first of these libraries (the best name first) that can be loaded, or None.

    One that this process uses already comes before all others: two copies of one library, perhaps of
    different versions, must never meet in one process.
    """
    for name in names:
        if (loaded := _load(name, os.RTLD_NOW | os.RTLD_NOLOAD)) is not None:
            return loaded
    for name in names:
        for candidate in (*map(str, _files(name)), name):
            if (library := _load(candidate, os.RTLD_NOW)) is not None:
                return library
    return None


def path(names: Sequence[str]) -> Path | None:
    """The first file of one of these names in PyPI's wheels or a CUDA toolkit, whether or not it loads."""
    return next((file for name in names for file in _files(name)), None)


def _load(name: str, mode: int) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=mode)
    except OSError:
        return None


def _files(name: str) -> Iterator[Path]:
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations if wheels else None) or ():
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit := os.environ.get(variable):
            for library in (Path(toolkit, "lib64", name), Path(toolkit, "lib", name)):
                if library.is_file():
                    yield library

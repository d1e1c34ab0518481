"""The text of the CUDA sources, each as one piece that needs no include path, and the options they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "cu"
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"\s*')


def names() -> list[str]:
    """All sources, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@cache
def text(source: str) -> str:
    """gpu/cu/`source`.cu with the files it includes in place, so that the text is all that counts."""
    return "".join(_lines(f"{source}.cu", set()))


def storage_define(type: str) -> str:
    """What to define for kernels that store "bfloat16", "float32" or "float64"."""
    return f"STORAGE_{type.upper()}"


def options(defines: Iterable[str]) -> list[str]:
    """For NVRTC. Divisions and roots stay exact: nothing here is bound by them."""
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

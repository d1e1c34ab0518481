"""Keep what was found fastest beside the machine code, so that the next start times nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from distgpt.core.base.caches import cache_folder, made_by_one

TUNE_ANEW = "DISTGPT_TUNE_ANEW"  # 1: time everything again, and keep that


class Kept:
    """Choices, each in a file, that hold for equal GPUs with equal libraries and this code.

    Of the ranks of a node one makes a choice, and the others take it. `facts`: what a choice depends on;
    None: nothing is kept.
    """

    def __init__(self, facts: Sequence[object] | None) -> None:
        self._folder = None if facts is None else cache_folder("kernels")
        self._facts = [*(facts or ()), _code()]

    def choice(self, what: str, accepts: Callable[[bytes], bool], make: Callable[[], bytes]) -> bytes:
        """Return the choice for `what`: a kept one that `accepts` takes, else a new one."""
        if self._folder is None:
            return make()
        key = sha256(repr([what, *self._facts]).encode()).hexdigest()[:24]
        anew = os.environ.get(TUNE_ANEW) == "1"
        return made_by_one(self._folder / f"{key}.choice", make, (lambda kept: False) if anew else accepts)


@cache
def _code() -> str:
    """Return a checksum of the code that choices are between."""
    here = Path(__file__).parent
    content = (file.read_bytes() for file in sorted((*here.glob("*.py"), *here.glob("cu/*"))))
    return sha256(b"\0".join(content)).hexdigest()

"""The caches of the libraries that distgpt uses, moved to DISTGPT_CACHE with its own (core/base/caches.py).

Not moved: what a library that was imported before distgpt has read of its variables already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.caches import cache_folder, places, requested_folder

FOLDER = "distgpt-libraries"  # in DISTGPT_CACHE, where a user may have libraries of his own


@dataclass(frozen=True, slots=True)
class LibraryCache:
    """A folder that a library keeps, and how the library finds it."""

    library: str
    what: str
    variable: str  # names the folder
    usual: str  # below the user's cache, or his home if it begins with ~, where no variable says otherwise
    below: str  # in FOLDER
    also: tuple[tuple[str, str], ...] = ()  # other variables that the library asks then: name, path below it
    is_read: bool = False  # it is of use on a disk that is read-only, too

    def path(self) -> Path:
        """Return where it lies now."""
        for name, below in ((self.variable, ""), *self.also):
            if given := os.environ.get(name):
                return Path(given, below)
        user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(os.path.expanduser(self.usual if self.usual[0] == "~" else f"{user}/{self.usual}"))  # noqa: PTH111


DOWNLOADS = (
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
)  # HF_HOME itself would move a user's token, too
LIBRARIES = (
    LibraryCache("matplotlib", "list of fonts", "MPLCONFIGDIR", "matplotlib", "matplotlib"),
    LibraryCache(
        "huggingface_hub", "downloads", "HF_HUB_CACHE", "huggingface/hub", "hub", DOWNLOADS, is_read=True
    ),
    LibraryCache(
        "hf-xet", "parts of downloads", "HF_XET_CACHE", "huggingface/xet", "xet", (("HF_HOME", "xet"),)
    ),
    LibraryCache("CuPy", "kernels for GPUs", "CUPY_CACHE_DIR", "~/.cupy/kernel_cache", "cupy"),
    LibraryCache("CUDA", "kernels for GPUs", "CUDA_CACHE_PATH", "~/.nv/ComputeCache", "cuda"),
)


def move() -> None:
    """Set the libraries' variables, except for those that the user has set."""
    asked, writable = requested_folder(), cache_folder(FOLDER)
    for each in LIBRARIES:
        if any(os.environ.get(name) for name in (each.variable, *dict(each.also))):
            continue
        folder = asked / FOLDER if asked and asked in places() and each.is_read else writable
        if folder:
            os.environ[each.variable] = str(folder / each.below)

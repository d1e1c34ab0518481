"""The caches: what lies where, how large and how old it is, what made it; and how they are emptied.

Other processes may run meanwhile: what they have read they keep, what they miss they make again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distgpt.core.base import caches
from distgpt.core.base.errors import print_lines
from distgpt.core.base.formatting import count, size, size_in_column
from distgpt.core.cpu.compiling import disk_cache
from distgpt.doctor.report import pairs, print_page
from distgpt.launch.environment import launched_rank
from distgpt.moved_caches import FOLDER, LIBRARIES

IN_USE = 3600.0  # seconds: a lock, or a file that is being written, is not older
# What formats/fetched.py keeps in `models`, a name that a user's own folder in DISTGPT_CACHE may have, too.
MODEL = re.compile(r"\.?[\w.-]+--[\w.-]+\.safetensors(\.[0-9a-f]{12}\.tmp)?")
TOKENIZED = Path("runs/tokenized")  # where `train` keeps them by default


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of a cache. `emptied`: by which word of --empty; "" if distgpt leaves it alone."""

    what: str
    made_by: str
    path: str
    emptied: str
    size: int = 0
    files: int = 0
    last_use: float | None = None  # seconds since 1970


def report_caches(empty: str, as_json: bool) -> None:
    """Print what there is. Remove first what `empty` names: "compiled", "all", or nothing. One rank does."""
    if launched_rank():
        return
    if empty:
        _empty([each for each in list_caches() if each.emptied and empty in (each.emptied, "all")])
    found = list_caches()
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return
    for each in found:
        used = time.strftime("%Y-%m-%d", time.localtime(each.last_use))
        about = f"{size_in_column(each.size):>8}  {count(each.files, 'file'):>12}  used {used}  "
        print_lines(f"{each.path}\n  {about}{each.what}, made by {each.made_by}")
    print_page([pairs(_notes(found))])


def list_caches() -> list[Found]:
    """List all folders that hold something, those of other versions too."""
    found = []
    for each in {each.path: each for each in _folders()}.values():  # a place may have two names
        stats = []
        for path in _files(each):
            with suppress(OSError):
                stats.append(path.lstat())
        if stats:
            last = max(max(each.st_atime, each.st_mtime) for each in stats)
            size = sum(each.st_size for each in stats)
            found.append(replace(each, size=size, files=len(stats), last_use=last))
    return found


def _folders() -> Iterator[Found]:
    yield Found("compiled loops of the site", "distgpt compile", str(disk_cache.SITE), "")
    in_use = caches.places(disk_cache.beside())
    for place in dict.fromkeys((*in_use, disk_cache.beside(), caches.usual_folder())):

        def emptied(folder: Path, word: str, place: Path = place) -> str:
            # Elsewhere other processes, whose DISTGPT_CACHE is another, may keep theirs.
            return word if place in in_use and _is_own(folder) else ""

        with suppress(OSError):
            for folder in sorted(place.iterdir()):
                if caches.is_compiled(folder):
                    version = "this" if folder.name == disk_cache.folder_name() else "another"
                    loops = f"compiled loops of {version} version"
                    what = "kernels for GPUs" if folder.name.startswith("kernels") else loops
                    yield Found(what, "distgpt", str(folder), emptied(folder, "compiled"))
        models = place / "models"
        yield Found("models named hub:…", "distgpt", str(models), emptied(models, "all"))
    for each in LIBRARIES:
        # What others may share is theirs to empty.
        is_ours = any(place / FOLDER in each.path().parents for place in caches.places())
        word = ("all" if each.is_read else "compiled") if is_ours else ""
        yield Found(each.what, each.library, str(each.path()), word)
    yield Found("tokenized texts", "distgpt train", str(TOKENIZED), "")


def _files(found: Found) -> list[Path]:
    """List the files of a cache, below a library's folder too; a link is one of them, wherever it leads."""
    folder = Path(found.path)
    if found.made_by != "distgpt":
        return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    with suppress(OSError):
        if caches.is_compiled(folder):
            return caches.compiled_files(folder)
        return [path for path in folder.iterdir() if MODEL.fullmatch(path.name)]
    return []


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        return not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
    return False


def _empty(every: list[Found]) -> None:
    removed, n_bytes, failures = 0, 0, []
    for path in (path for each in every for path in _files(each)):
        try:
            found = path.lstat()
            if path.name.startswith(".") and time.time() - found.st_mtime < IN_USE:
                continue
            path.unlink()
            removed, n_bytes = removed + 1, n_bytes + found.st_size
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(f"; cannot remove {path}: {error.strerror}")
    for each in every:
        below = [] if each.made_by == "distgpt" else [parent for parent, _, _ in os.walk(each.path)]
        for folder in (*reversed(below), each.path):
            with suppress(OSError):
                Path(folder).rmdir()
    print_lines(
        f"removed {count(removed, 'file')}, {size(n_bytes)}{failures[0] if failures else ''}", err=True
    )


def _notes(found: list[Found]) -> Iterator[tuple[str, str]]:
    asked = caches.requested_folder()
    own = None if disk_cache.site() else disk_cache.folder()  # which makes it
    if disk_cache.site():
        yield "compiled loops", f"are the site's, of {disk_cache.site_path().name}"
    else:
        yield "compiled loops", f"are kept in {own}" if own else "cannot be kept"
    yield caches.CACHE, f"{asked}" if asked else "not set: it names one folder for all of this"
    if own and (trouble := caches.misplaced(own)):
        yield "", trouble
    yield caches.LIMIT, f"{size(caches.cache_limit())} of what distgpt compiles"
    if asked and any(each.made_by == "distgpt" and not each.emptied for each in found):
        yield "elsewhere", f"is emptied where {caches.CACHE} is not set"

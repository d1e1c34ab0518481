"""The caches: their paths, contents and sizes, and how to empty them.

Other processes may run at the same time. They keep the files they have read, and recreate missing ones.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from distgpt.cluster.launch.environment import launched_rank
from distgpt.core.base import caches
from distgpt.core.base.errors import print_lines
from distgpt.core.base.formatting import count, size, size_in_column
from distgpt.core.cpu.compiling import disk_cache
from distgpt.measure.doctor.facts import Facts

IN_USE = 3600.0  # seconds; locks and unfinished files are never older
# Files that models/formats/huggingface.py keeps in `models`. The pattern protects a user's own directory of
# that name in DISTGPT_CACHE.
MODEL = re.compile(r"\.?[\w.-]+--[\w.-]+\.safetensors(\.[0-9a-f]{12}\.tmp)?")
TOKENIZED = Path("runs/tokenized")  # default directory of `train`

Folder = tuple[Path, str, str, list[Path]]  # path, content, the word that empties it or "", files


def report_caches(empty: str, as_json: bool) -> None:
    """Empty the caches that `empty` selects ("compiled", "all" or ""), then print all. Only on one rank."""
    if launched_rank():
        return
    if empty:
        _empty([folder for folder in _folders() if folder[2] and empty in (folder[2], "all")])
    result = []
    for path, what, emptied, files in _folders():
        stats = []
        for file in files:
            with suppress(OSError):  # another process may remove the file
                stats.append(file.lstat())
        if stats:
            used = max(max(each.st_atime, each.st_mtime) for each in stats)
            about: Facts = {"path": str(path), "what": what, "emptied": emptied, "last_use": used}
            result.append(about | {"size": sum(each.st_size for each in stats), "files": len(stats)})
    if as_json:
        print(json.dumps(result, indent=1))
        return
    for each in result:
        day = time.strftime("%Y-%m-%d", time.localtime(each["last_use"]))
        sizes = f"{size_in_column(each['size']):>8}  {count(each['files'], 'file'):>12}"
        print_lines(f"{each['path']}\n  {sizes}  used {day}  {each['what']}")
    if disk_cache.site():
        print_lines(f"using the site's compiled loops, {disk_cache.site_path().name}")
    elif own := disk_cache.folder():
        print_lines(caches.misplaced(own) or f"compiled loops are cached in {own}")
    else:
        print_lines("cannot cache compiled loops")


def _folders() -> Iterator[Folder]:
    """Yield all cache directories, also of other versions."""
    yield disk_cache.SITE, "compiled loops of the site", "", _below(disk_cache.SITE)
    in_use = caches.places(disk_cache.beside())
    for place in dict.fromkeys((*in_use, disk_cache.beside(), caches.usual_folder())):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            with suppress(OSError):
                # Other places may be in use by processes with a different DISTGPT_CACHE.
                is_ours = place in in_use and not path.is_symlink() and path.stat().st_uid == os.geteuid()
                if caches.is_compiled(path):
                    version = "this" if path.name == disk_cache.folder_name() else "another"
                    is_gpu = path.name.startswith("kernels")
                    what = "kernels for GPUs" if is_gpu else f"compiled loops of {version} version"
                    yield path, what, "compiled" * is_ours, caches.compiled_files(path)
                elif path.name == "models":
                    models = [file for file in path.iterdir() if MODEL.fullmatch(file.name)]
                    yield path, "models named hub:…", "all" * is_ours, models
    yield TOKENIZED, "tokenized text of distgpt train", "", _below(TOKENIZED)


def _below(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def _empty(folders: list[Folder]) -> None:
    removed, n_bytes, failure = 0, 0, ""
    for path in (path for *_, files in folders for path in files):
        try:
            result = path.lstat()
            if path.name.startswith(".") and time.time() - result.st_mtime < IN_USE:
                continue
            path.unlink()
            removed, n_bytes = removed + 1, n_bytes + result.st_size
        except FileNotFoundError:
            continue
        except OSError as error:
            failure = failure or f"; cannot remove {path}: {error.strerror}"
    for folder, *_ in folders:
        with suppress(OSError):
            folder.rmdir()
    print_lines(f"removed {count(removed, 'file')}, {size(n_bytes)}{failure}", err=True)

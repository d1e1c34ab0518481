"""distgpt compile"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from distgpt.commands.help import command
from distgpt.core.base.errors import StorageError, print_lines
from distgpt.core.base.formatting import clock, count, size


def _shown(text: str) -> AbstractContextManager[object]:
    """Show on a terminal what is being compiled, as a part takes up to a minute or two."""
    from rich.console import Console

    return Console(file=sys.stderr).status(text) if sys.stderr.isatty() else nullcontext()


@command(example="distgpt compile")
def compile() -> None:
    """Compile all kernels for this kind of processor, once for every user of this installation.

    They go into one file beside the package, which only its owner may write. Run it once on each kind of
    node, and again after an update. Those of float64, which few use, are left to their users.
    """
    import io
    import tempfile
    import time
    from contextlib import redirect_stderr
    from pathlib import Path

    from distgpt.core.cpu.compiling import disk_cache
    from distgpt.core.cpu.compiling.processor import processor
    from distgpt.measure import site_cache

    site_cache.require_writable()
    if disk_cache.folder() is None:  # where they are made before they are shared
        raise StorageError("compiled loops cannot be kept: set DISTGPT_CACHE to a folder of your own")
    begun, known = time.monotonic(), len(disk_cache.used)
    from distgpt.measure.precompile import parts  # which uses some itself

    with tempfile.TemporaryDirectory(prefix="distgpt-compile-") as folder:
        wanted = list(parts(Path(folder)))
        print_lines(
            f"compiling {count(len(wanted), 'part')} for {processor()[0]}, which takes some minutes;"
            " if it is interrupted, the next start begins with what is done"
        )
        for number, (name, act) in enumerate(wanted, 1):
            started = time.monotonic()
            with _shown(f"{number} of {len(wanted)}: {name}"), redirect_stderr(io.StringIO()):
                act()  # what training a model notes is of no interest here
            new, known = len(disk_cache.used) - known, len(disk_cache.used)
            print_lines(f"{clock(time.monotonic() - started):>5}  {count(new, 'kernel'):>11}  {name}")
    path = site_cache.share()
    print_lines(
        f"{count(len(disk_cache.used), 'kernel')} in {clock(time.monotonic() - begun)}: {path}, "
        f"{size(path.stat().st_size)}, for all users on such processors"
    )

"""distgpt compile"""

from __future__ import annotations

from distgpt.commands.help import command
from distgpt.core.base.errors import StorageError, print_lines
from distgpt.core.base.formatting import clock, count, size


@command(example="distgpt compile")
def compile() -> None:
    """Compile all kernels for this kind of processor, once for every user of this installation.

    They go into one file beside the package, which only its owner may write. Run it once on each kind of
    node, and again after an update.
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
    from distgpt.measure.precompile import parts

    print_lines(f"compiling for {processor()[0]}, which takes some minutes")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, act in parts(Path(folder)):
            started, before = time.monotonic(), len(disk_cache.used)
            with redirect_stderr(io.StringIO()):  # what training a model would note
                act()
            new = count(len(disk_cache.used) - before, "kernel")
            print_lines(f"{clock(time.monotonic() - started):>5}  {new:>11}  {name}")
    path = site_cache.share()
    print_lines(
        f"{count(len(disk_cache.used), 'kernel')} in {clock(time.monotonic() - begun)}: {path}, "
        f"{size(path.stat().st_size)}, for all users on such processors"
    )

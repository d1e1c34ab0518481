"""A file of metrics for node_exporter's textfile collector."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from distgpt.core.base.errors import UsageError, escape, print_lines
from distgpt.core.base.files import new_file, unfinished
from distgpt.core.train.lines import Facts, Metrics
from distgpt.fleet.exporter import Exporter

SECONDS_BETWEEN = 15.0  # versions of the file: as often as Prometheus is often set to ask
ENDING = ".prom"  # node_exporter reads no other files


class Textfile(Exporter):
    """Writes the metrics into a file for node_exporter's textfile collector, every 15 seconds.

    The file stays after the run, and says how it ended: Prometheus may not have asked since.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        is_folder = path.is_dir()
        if not is_folder and path.suffix != ENDING:
            raise UsageError(
                f"--metrics-textfile {path}: name a folder that is there, or a file that ends in {ENDING},"
                " since node_exporter reads no others"
            )
        if not is_folder and not path.parent.is_dir():
            raise UsageError(f"--metrics-textfile {path}: there is no folder {path.parent}")
        self._path, self._is_folder = path.absolute(), is_folder
        self._written = 0.0
        self._is_failing = False

    def started(self, facts: Facts) -> None:
        super().started(facts)
        if self._is_folder:
            run = Path(facts["directory"]).absolute()
            self._path /= f"distgpt-{run.name}-{crc32(str(run).encode(errors='replace')):08x}{ENDING}"
        self._write()

    def stepped(self, metrics: Metrics) -> None:
        super().stepped(metrics)
        if time.monotonic() - self._written >= SECONDS_BETWEEN:
            self._write()

    def close(self) -> None:
        is_first = self._exit_code is None
        super().close()
        if self._run and is_first:
            self._write()

    def _write(self) -> None:
        """Replace the file; one that cannot be written is no reason to end a run.

        Not by `atomic_file`, which waits for the disk: this file may be lost with the power.
        """
        self._written = time.monotonic()
        partial = unfinished(self._path)
        try:
            with new_file(partial) as file:
                file.write(self.page().encode())
            partial.replace(self._path)
            self._is_failing = False
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            if not self._is_failing:
                why = f"cannot write {escape(str(self._path))}: {error.strerror or error}"
                print_lines(f"{why}; the run goes on without its metrics", err=True)
            self._is_failing = True

"""Names of weights: a file, the directory of a run or of a checkpoint, or a name that a table knows."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from distgpt.core.base.errors import UsageError, command_line
from distgpt.core.base.files import storage_errors
from distgpt.core.base.tables import Table
from distgpt.core.saved.checkpoint import WEIGHTS, newest_intact
from distgpt.core.saved.rundir import RunDirectory


class WeightsSource(Protocol):
    """A row of the table of weights, by what their names begin with before a colon."""

    def __call__(self, name: str, fetches: bool) -> Path:
        """Return the weights file of this name. Without `fetches` refuse one that is not on this machine."""


SOURCES: Table[WeightsSource] = Table("weights", "weights of", {})


def weights_of(name: Path, fetches: bool = True) -> Path:
    """Return the weights file of this name. Fetch it, or refuse to, where it is not on this machine."""
    key, _, rest = str(name).partition(":")
    source = SOURCES.get(key) if rest and not name.exists() else None
    return find_weights(name) if source is None else source(rest, fetches)


def find_weights(path: Path) -> Path:
    """Return a weights file: of a run the best, else the last, else that of its newest intact checkpoint.

    Where the path holds a model in another format, a UsageError names the command that imports it.
    """
    with storage_errors("read", path):
        if path.suffix == ".gguf" and path.is_file():
            raise UsageError(f"{path} is in GGUF: first {import_command(path, path.stem)}")
        if not path.is_dir():
            return path
        run = RunDirectory(path)
        for file in (run.best, run.weights) if run.config.is_file() else (path / WEIGHTS,):
            if file.is_file():
                return file
        if (path / "config.json").is_file():
            raise UsageError(f"{path} holds a model of transformers: first {import_command(path)}")
    if newest := newest_intact(run.checkpoints):
        return newest[0] / WEIGHTS
    raise UsageError(f"{path} is a directory without weights: give a weights file, or the directory of a run")


def import_command(source: Path, name: str = "") -> str:
    """Return the command that imports a directory of transformers, or a file, to one of this name."""
    out = f"{name or source.resolve().name}.safetensors"
    return command_line("weights", "import", source, "--out", out)

"""Which weights file a path means: a file itself, a run's directory, a checkpoint."""

from __future__ import annotations

from pathlib import Path

from distgpt.errors import UsageError, command_line
from distgpt.files import storage_errors
from distgpt.saved.checkpoint import WEIGHTS, newest_intact
from distgpt.saved.rundir import RunDirectory


def weights_file(path: Path) -> Path:
    """Of a run: the best weights, else the last ones, else those of its newest intact checkpoint.

    A UsageError names the command to use where the path holds a model of another kind.
    """
    with storage_errors("read", path):
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


def import_command(directory: Path) -> str:
    """What makes a file of ours out of a directory of transformers."""
    return command_line("weights", "import", directory, "--out", f"{directory.resolve().name}.safetensors")

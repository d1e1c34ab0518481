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
            imported = command_line("weights", "import", path, "--out", f"{path.resolve().name}.safetensors")
            raise UsageError(f"{path} holds a model of transformers: first {imported}")
    if newest := newest_intact(run.checkpoints):
        return newest[0] / WEIGHTS
    raise UsageError(f"{path} is a directory without weights: give a weights file, or the directory of a run")

"""What keeps a measurement from being made: found out before it, or when its process has failed."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from distgpt.errors import DistgptError, error_for
from distgpt.machine.processes import OUR_LINE, Ended, ending
from distgpt.machine.stages import ON_GPU


def check_gpu(stage: str, dtype: str, launcher: str | None, hostfile: Path | None) -> None:
    """Refuse a stage that this machine's GPUs cannot run, where its processes will be on this machine."""
    if stage in ON_GPU and launcher is None and hostfile is None:
        from distgpt.gpu.probe import require_gpu

        require_gpu(stage, dtype)


def raise_failure(ended: Ended, what: str) -> NoReturn:
    """Its own error with its own exit code if it is one of ours, else one that tells how it ended."""
    kind = error_for(ended.code)
    said = ended.complaint()
    if kind is not DistgptError and any(line.startswith(OUR_LINE) for line in ended.errors.splitlines()):
        raise kind(said)
    words = f": {said}" if said else ""
    raise DistgptError(f"{what} failed ({ending(ended.code)}){words}")

"""The other side of a comparison: a Python that has PyTorch, and the programs it is given to run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distgpt.config import ModelConfig
from distgpt.errors import DistgptError, StorageError
from distgpt.machine.processes import Ended, run, unlaunched
from distgpt.measure.bench.failing import raise_failure

FOLDER = Path(__file__).parent

# Beginnings of settings that would steer one side's BLAS and not the other's: both run as they come.
_STEERING = ("OPENBLAS_", "MKL_", "OMP_", "ATEN_", "ONEDNN_", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")


def unsteered(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for either side of a comparison."""
    return {key: value for key, value in unlaunched(environ).items() if not key.startswith(_STEERING)}


def torch_version(python: str) -> str | None:
    """None where it has no PyTorch, or is no Python."""
    try:
        found = run([python, "-c", "import torch; print(torch.__version__)"], env=unsteered(), timeout=120)
    except StorageError:
        return None
    return found.output.strip() if found.code == 0 else None


def ask(python: str, program: str, *words: object) -> dict[str, Any]:
    """The line of JSON that one of the peer's programs ends with, its peak memory with it."""
    ended = run([python, FOLDER / program, *words], env=unsteered())
    return answer(ended, f"PyTorch's {program}")


def answer(ended: Ended, what: str) -> dict[str, Any]:
    """The last line of a child's output, which is JSON if it ended well."""
    if ended.code:
        raise_failure(ended, what)
    lines = ended.output.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise DistgptError(f"{what} told nothing: {ended.complaint()}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def for_torch(shape: ModelConfig) -> dict[str, Any]:
    """The architecture in the words of the peer, which are ours but for one."""
    values = asdict(shape)
    values.pop("init_residual")
    return values

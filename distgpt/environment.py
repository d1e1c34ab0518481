"""What a measurement has to be read with: when, by what command, on which machine, with which software."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from distgpt.comm.cores import usable_cores
from distgpt.facts import compute, cpu, memory, versions
from distgpt.gpu.probe import driver


def environment() -> dict[str, Any]:
    """Nothing in it names the host, its user or their folders."""
    gpus = driver()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["distgpt", *map(shown, sys.argv[1:])]),
        "commit": commit(),
        "processor": cpu(),
        "cores": len(usable_cores()),
        "cores_of_host": os.cpu_count() or 1,
        "memory_bytes": memory()["total"],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
        "blas": " ".join(filter(None, (compute()[key] for key in ("blas", "core")))),
        "gpus": [gpu.name for gpu in gpus.gpus] if gpus else [],
    }


def shown(word: str) -> str:
    """An argument as others may read it: of a path into this machine the last name."""
    name, equals, value = word.rpartition("=")
    return name + equals + (Path(value).name if value.startswith("/") else value)


def commit() -> str | None:
    """The state of the sources, "+" behind it where they were changed; None outside a git checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--show-prefix", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5
        )
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    prefix, _, name = head.stdout.strip().partition("\n")
    if head.returncode or prefix != "distgpt/":  # an installed package may lie in somebody else's checkout
        return None
    return name + "+" * bool(changes.stdout.strip())

"""What a measurement has to be read with: when, by what command, on which machine, with which software."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from distgpt.comm.cores import usable_cores
from distgpt.gpu.probe import driver
from distgpt.machine.facts import compute, cpu, memory, versions

# What stands before the name of a host, a home of anybody, and a path that tells of folders of this machine.
_HOST = re.compile(r"((?<![\w-])(?:--?(?:hosts?|nodelist)|-[wH])(?:=|\s+)|\bon (?:node|host) )[^\s'\"]+")
_HOME = re.compile(r"(?<![\w./~-])/(?:home|Users)/[^/\s'\":,;]+")
_PATH = re.compile(r"(?<![\w./~-])(?:~[\w.-]*|\.\.)?/(?!/)[^\s'\"`,;:()<>|]*")


def environment() -> dict[str, Any]:
    """Nothing in it names the host, its user or their folders."""
    gpus, computes = driver(), compute()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shown(shlex.join(["distgpt", *sys.argv[1:]])),
        "commit": commit(),
        "processor": cpu(),
        "cores": len(usable_cores()),
        "cores_of_host": os.cpu_count() or 1,
        "memory_bytes": memory()["total"],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
        "blas": " ".join(filter(None, (computes["blas"], computes["core"]))),
        "gpus": [gpu.name for gpu in gpus.gpus] if gpus else [],
    }


def shown(text: str) -> str:
    """A text as others may read it: of a path its last name, and nothing of hosts and homes."""
    text = _HOST.sub(r"\1…", text)
    for home in {str(Path.home()), os.environ.get("HOME", "")} - {"", "/"}:
        text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
    text = _PATH.sub(lambda found: Path(found.group()).name or found.group(), _HOME.sub("~", text))
    for name in (platform.node(), platform.node().partition(".")[0]):
        if name in ("", "localhost", "distgpt"):
            continue
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "…", text)
    return text


def commit() -> str | None:
    """The state of the sources, "+" behind it where they were changed; None outside a git checkout."""
    here = Path(__file__).parent.parent
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

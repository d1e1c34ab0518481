"""What belongs beside a measurement: its date, command, machine and software."""

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

# The name of a host behind the words that announce it, anybody's home, and a path on this machine.
_HOST = re.compile(r"((?<![\w-])(?:--?(?:hosts?|nodelist)|-[wH])(?:=|\s+)|\bon (?:node|host) )[^\s'\"]+")
_HOME = re.compile(r"(?<![\w./~-])/(?:home|Users)/[^/\s'\":,;]+")
_PATH = re.compile(r"(?<![\w./~-])(?:~[\w.-]*|\.\.)?/(?!/)[^\s'\"`,;:()<>|]*")


def environment() -> dict[str, Any]:
    """Date, command, machine and software, without names of the host, its user or their folders."""
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
    """A text fit to publish: paths shortened to their last name, hosts and homes removed."""
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
    """The commit of the sources, with "+" if they were changed; None outside a git checkout."""
    try:
        prefix, _, name = _git("rev-parse", "--show-prefix", "HEAD").partition("\n")
        if prefix != "distgpt/":  # an installed package may lie in somebody else's checkout
            return None
        return name + "+" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    here = Path(__file__).parent.parent
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()

"""Facts about this machine and its software, for one rank and for the record of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distgpt.core.base import __version__
from distgpt.core.base.errors import DistgptError, UsageError, escape, first_line
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores, granted_memory, usable_cores
from distgpt.core.config import RunConfig
from distgpt.core.cpu.stages import expected_dtype
from distgpt.core.train.report import processor_name

Facts = dict[str, Any]

REPORTED = ("OPENBLAS_CORETYPE", "CUDA_VISIBLE_DEVICES")  # environment variables
# A host name after the words that introduce it, a user's home directory, and a path on this machine.
_HOST = re.compile(r"((?<![\w-])(?:--?(?:hosts?|nodelist)|-[wH])(?:=|\s+)|\bon (?:node|host) )[^\s'\"]+")
_HOME = re.compile(r"(?<![\w./~-])/(?:home|Users)/[^/\s'\":,;]+")
_PATH = re.compile(r"(?<![\w./~-])(?:~[\w.-]*|\.\.)?/(?!/)[^\s'\"`,;:()<>|]*")


def of_rank(comm: Comm) -> Facts:
    """Return everything about this rank, ready for JSON."""
    return {
        "rank": comm.rank,
        "local_rank": comm.local_rank,
        "local_size": comm.local_size,
        "host": platform.node(),
        "cpu": processor_name(),
        "auto_dtype": auto_dtype(),
        "cores": len(usable_cores()),
        "core_share": comm.cores,
        "cores_of_host": os.cpu_count() or 1,
        "granted_cores": asdict(granted_cores(comm.cores, comm.local_size)),
        "memory": memory(),
        "system": system(),
        "versions": versions(),
        "compute": compute(),
        "gpu": gpu_facts(comm),
        "environment": {key: os.environ[key] for key in REPORTED if key in os.environ},
    }


def gpu_facts(comm: Comm) -> Facts:
    """Return the GPUs, libraries, missing requirements of the GPU stages, and the GPU of this rank."""
    from distgpt.gpu import probe
    from distgpt.gpu.stage import device_of

    result = probe.probe()
    gpus = result.driver.gpus if result.driver else ()
    missing = {dtype: probe.missing_for_gpu(result, dtype) for dtype in ("float32", "bfloat16")}
    return {
        **asdict(result),
        "takes": device_of(comm.local_rank, len(gpus)) if gpus else None,
        "missing": {dtype: [asdict(each) for each in those] for dtype, those in missing.items()},
    }


def system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def memory() -> Facts:
    """Return the bytes of memory this process can use, how many are free, and which limit applies."""
    granted = granted_memory()
    total = granted.total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total": total, "available": min(granted.free, total), "limit": granted.limit}


def versions() -> dict[str, str]:
    versions = {"distgpt": __version__, "python": platform.python_version()}
    for name in ("numpy", "numba", "mpi4py"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def compute() -> Facts:
    """Return NumPy's BLAS, where compiled loops are kept, and why they do not load, if so."""
    try:
        import numpy as np

        from distgpt.core.cpu.compiling import disk_cache
        from distgpt.core.cpu.matmul.blas import blas_core_name

        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
    except (ImportError, OSError, DistgptError) as error:
        reason = f"NumPy or Numba does not work ({first_line(error)})"
        broken = {"what": reason, "remedy": "pip install --force-reinstall numpy numba"}
        return {"blas": "", "core": "", "loops": None, "missing": [broken]}
    loops = disk_cache.site_path() if disk_cache.site() else disk_cache.folder()
    name = f"{blas['name']} {blas['version']}"
    return {"blas": name, "core": blas_core_name(), "loops": loops and str(loops), "missing": []}


def auto_dtype() -> str:
    """Return the dtype that --dtype auto selects for a small model here, and why; "" on errors."""
    try:
        result = expected_dtype("serial", RunConfig())
    except UsageError as error:  # invalid environment variables
        return str(error)
    except Exception:  # compute() reports the reason
        return ""
    return f"{result.name}: {result.why}" if result.why else result.name


def environment() -> dict[str, Any]:
    """Return date, command, machine and software, without names of the host, the user or directories."""
    from distgpt.gpu.probe import driver

    gpus, computes, mpi = driver(), compute(), {}
    if "mpi4py.MPI" in sys.modules:
        from distgpt.core.comm.mpi import library

        mpi = {"mpi": library()}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": anonymised(escape(shlex.join(["distgpt", *sys.argv[1:]]))),
        **({"commit": known} if (known := commit()) else {}),
        "processor": processor_name(),
        "cores": len(usable_cores()),
        "cores_of_host": os.cpu_count() or 1,
        "memory_bytes": memory()["total"],
        "system": system(),
        "versions": versions() | mpi,
        "blas": " ".join(filter(None, (computes["blas"], computes["core"]))),
        "gpus": [gpu.name for gpu in gpus.gpus] if gpus else [],
    }


def anonymised(text: str) -> str:
    """Make a string fit to publish: shorten paths to their last name, remove hosts and homes."""
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
    """Return the commit of the sources, with "+" if they have changes; None outside a git checkout."""
    try:
        prefix, _, name = _git("rev-parse", "--show-prefix", "HEAD").partition("\n")
        if prefix != "distgpt/":  # an installed package may be inside another project's checkout
            return None
        return name + "+" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    here = Path(__file__).parents[2]
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()

"""What one process finds out about itself: its machine, its software, how it was launched, its MPI."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distgpt import __version__
from distgpt.comm.api import Comm
from distgpt.comm.cores import available_memory, cgroup, usable_cores
from distgpt.comm.launched import LAUNCHERS, launched_as, launchers_counts
from distgpt.errors import DistgptError, UsageError
from distgpt.gpu.probe import Missing, missing_for_gpu, probe, useful_for_gpu
from distgpt.machine.stages import device_of, open_stage

Facts = dict[str, Any]

# Settings of other thread pools; distgpt has its own.
IGNORED = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS"),
    *("BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS"),
)
REPORTED = (*IGNORED, "OPENBLAS_CORETYPE", "CUDA_VISIBLE_DEVICES")

SECONDS_FOR_MPI = 20
_ASK_MPI = "from distgpt.machine.facts import report_mpi; report_mpi()"
_ASK_VENDOR = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
)


def launch(environ: Mapping[str, str] = os.environ) -> Facts:
    """The launcher of this process, "" if there is none, and the number of processes it started."""
    seen = launchers_counts(environ)
    return {
        "launcher": LAUNCHERS[next(iter(seen))] if seen else "",
        "processes": launched_as(environ),
    }


def of_rank(comm: Comm) -> Facts:
    """Everything about this rank, ready for JSON."""
    return {
        "rank": comm.rank,
        "local_rank": comm.local_rank,
        "local_size": comm.local_size,
        "host": platform.node(),
        "cpu": cpu(),
        "cores": len(usable_cores()),
        "core_share": comm.cores,
        "cores_of_host": os.cpu_count() or 1,
        "core_quota": core_quota(cgroup("cpu.max")),
        "memory": memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
        "compute": compute(),
        "gpu": _gpu(comm),
        "environment": {key: os.environ[key] for key in REPORTED if key in os.environ},
    }


def cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory() -> Facts:
    """Bytes of memory that this process can have, and how many of them are free now."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return {"total": None, "available": None}
    total = min([total, *(int(limit) for limit in cgroup("memory.max") if limit.isdigit())])
    return {"total": total, "available": min(available_memory(), total)}


def core_quota(limits: list[str]) -> float | None:
    """How many cores' worth of time the container allows, which may be less than the usable cores."""
    pairs = (limit.split() for limit in limits)
    return min((int(time) / int(period) for time, period in pairs if time.isdigit()), default=None)


def versions() -> dict[str, str]:
    versions = {"distgpt": __version__, "python": platform.python_version()}
    for name in ("numpy", "numba", "mpi4py"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def compute() -> Facts:
    """NumPy's BLAS as the CPU kernels use it, and why they do not load, if so."""
    try:
        import numpy as np

        from distgpt.kernels.fused.blas import core_name

        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
    except (ImportError, OSError, DistgptError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        broken = Missing(
            f"NumPy or Numba does not work ({reason})", "pip install --force-reinstall numpy numba"
        )
        return {"blas": "", "core": "", "missing": _plain([broken])}
    return {"blas": f"{blas['name']} {blas['version']}", "core": core_name(), "missing": []}


def _gpu(comm: Comm) -> Facts:
    """What there is, why the GPU stages do not run, if so, and the GPU that this rank would take."""
    found = probe()
    gpus = found.driver.gpus if found.driver else ()
    return {
        **asdict(found),
        "takes": device_of(comm.local_rank, len(gpus)) if gpus else None,
        "missing": {dtype: _plain(missing_for_gpu(found, dtype)) for dtype in ("float32", "bfloat16")},
        "useful": {
            "cuda": _plain(useful_for_gpu(found, False)),
            "mpi-cuda": _plain(useful_for_gpu(found, True)),
        },
    }


def _plain(missing: list[Missing]) -> list[dict[str, str]]:
    return [asdict(each) for each in missing]


def running_mpi() -> Facts:
    """The MPI library, which has been started."""
    from mpi4py import MPI

    from distgpt.comm.mpi import is_cuda_aware

    vendor, version = MPI.get_vendor()
    return {
        "problem": "",
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "cuda_aware": is_cuda_aware(),
    }


def report_mpi() -> None:
    """Start MPI in this process and print what it is, as JSON."""
    try:
        open_stage("mpi")
        found = running_mpi()
    except UsageError as error:
        found = {"problem": str(error)}
    print(json.dumps(found), flush=True)


def distant_mpi() -> Facts:
    """The same from a process of its own, since an MPI that cannot start may end its process."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=SECONDS_FOR_MPI
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"MPI did not start within {SECONDS_FOR_MPI} s"}
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]  # libraries print, too
    if child.returncode or not lines:
        said = " ".join(child.stderr.split())[:200]
        return {"problem": f"MPI ended the process that started it ({said or 'without a message'})"}
    found: Facts = json.loads(lines[-1])
    return found


def foreign_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """What is wrong if Open MPI's mpirun started a process of another MPI, which may abort as it starts.

    In the opposite case each process starts and finds itself alone, which the stages notice.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return ""
    child = subprocess.run([sys.executable, "-c", _ASK_VENDOR], capture_output=True, text=True)
    vendor = child.stdout.strip()
    if child.returncode or vendor == "Open MPI":
        return ""
    return f"launched by Open MPI's mpirun, but mpi4py belongs to {vendor}; use the mpirun of {vendor}"


def mpirun(where: str | None = None) -> Facts:
    """The mpirun that a user would call, or the one at `where`, and the MPI it belongs to."""
    where = where or shutil.which("mpirun") or own_mpirun()
    if where is None:
        return {"path": None, "vendor": ""}
    try:
        says = subprocess.run([where, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        says = ""
    vendors = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "HYDRA": "MPICH", "Intel": "Intel MPI"}
    return {"path": where, "vendor": next((vendors[sign] for sign in vendors if sign in says), "")}


def own_mpirun() -> str | None:
    """The mpirun installed beside this Python, if there is one."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent))

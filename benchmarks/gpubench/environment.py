"""Where this ran: the device, the versions of everything, and what the machine can do at best."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import subprocess
from typing import Any

from distgpt.gpu import cublaslt, libraries
from gpubench.machine import DATASHEET_TFLOPS, ROOT
from gpubench.section import Section

PACKAGES = ("numpy", "numba", "cupy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend")
QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,temperature.gpu"


def environment(section: Section) -> None:
    report = section.report
    report.row("python", version=platform.python_version(), **_installed())
    changed = bool(_said("git", "status", "-s"))
    report.row("commit", id=_said("git", "rev-parse", "HEAD"), changed=changed)
    report.row("nvidia-smi", said=_said("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"))
    if section.python is not None:
        with report.attempt("PyTorch"):
            for answer in section.start_peers({"PyTorch": {"do": "versions"}}, timeout=60).values():
                report.row("peer", program=section.python, **answer)
            section.close()
    with report.attempt("device"):
        device, (_, memory) = section.machine.device, section.machine.device.memory()
        report.row("device", name=device.name, multiprocessors=device.multiprocessors, memory=memory)
    if not section.host:
        with report.attempt("versions"):
            report.row("cuda", **_cuda(section))
        with report.attempt("cuDNN"):
            import cudnn

            report.row("cuda", cudnn=cudnn.backend_version(), cudnn_frontend=cudnn.__version__)
    with report.attempt("copy"):
        size = 1 << 20 if section.quick else 1 << 31
        report.row("best", copy_bytes_per_s=section.machine.copy_bandwidth(size))
        section.machine.free()
    with report.attempt("product"):
        peak = section.machine.peak_tflops(64 if section.quick else 8192)
        report.row("best", bfloat16_tflops=peak, datasheet_tflops=DATASHEET_TFLOPS)


def _cuda(section: Section) -> dict[str, Any]:
    runtime = section.machine.device.xp.cuda.runtime
    found = {"runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
    library = libraries.find(cublaslt.NAMES)
    if library is not None:
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        found["cublaslt"] = int(library.cublasLtGetVersion())
    return found


def _installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _said(*command: str) -> str:
    """What a program says, or nothing where there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""The GPUs of this machine, as far as the component for them is installed."""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distgpt.core.base.tables import lacks_component
from distgpt.core.comm.api import Comm

if TYPE_CHECKING:
    from distgpt.gpu.probe import Driver

GPU_DTYPES, GPU_STAGES = ("float32", "bfloat16"), ("cuda", "mpi-cuda")


def _probe() -> ModuleType | None:
    """Return the module that looks for GPUs; None where it is not installed."""
    try:
        from distgpt.gpu import probe
    except ModuleNotFoundError as error:
        if not lacks_component(error):
            raise
        return None
    return probe


def gpu_driver() -> Driver | None:
    """Return the NVIDIA driver and the devices visible to this process; None without one."""
    probe = _probe()
    found: Driver | None = probe.driver() if probe else None
    return found


def gpu_facts(comm: Comm) -> dict[str, Any]:
    """Collect the GPUs and libraries, what the GPU stages lack, and the GPU that this rank would take."""
    if (probe := _probe()) is None:
        lacks = {"what": "distgpt.gpu is not installed here", "remedy": "install distgpt again"}
        return {
            "driver": None,
            "packages": {},
            "libraries": {},
            "visible": None,
            "takes": None,
            "missing": {dtype: [lacks] for dtype in GPU_DTYPES},
            "useful": {stage: [] for stage in GPU_STAGES},
        }
    from distgpt.gpu.stage import device_of

    found = probe.probe()
    gpus = found.driver.gpus if found.driver else ()
    missing = {dtype: probe.missing_for_gpu(found, dtype) for dtype in GPU_DTYPES}
    useful = {stage: probe.useful_for_gpu(found, stage == "mpi-cuda") for stage in GPU_STAGES}
    return {
        **asdict(found),
        "takes": device_of(comm.local_rank, len(gpus)) if gpus else None,
        "missing": {dtype: [asdict(each) for each in those] for dtype, those in missing.items()},
        "useful": {stage: [asdict(each) for each in those] for stage, those in useful.items()},
    }


def lacking_libraries(found: dict[str, Any]) -> list[str]:
    """Return the libraries that the GPU stages use and that were not found."""
    probe = _probe()
    return [name for name in probe.LIBRARIES if name not in found["libraries"]] if probe else []

"""Stages for a sweep: each rank of a job has one of its own, and trains alone."""

from __future__ import annotations

from dataclasses import replace

from distgpt.cluster.launch.environment import launched_as
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import Comm
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ON_GPU, SEVERAL, WITH_MPI, GpuConfig
from distgpt.core.cpu.stages import Notes, Stage, open_stage


def open_stages(name: str, threads: int | None, gpu: GpuConfig) -> tuple[Comm, Stage]:
    """Return the ranks of this job, and a stage for this rank alone. Collective."""
    if name in WITH_MPI:
        raise UsageError(f"here every rank has a stage of its own: --stage serial or cuda, not {name}")
    if launched_as() == 1:
        stage = open_stage(name, threads, gpu)
        return stage.comm, stage
    # GPUs need no way between them that takes memory.
    job = open_stage(SEVERAL[name], threads, replace(gpu, allreduce="host") if name in ON_GPU else gpu)
    alone = SerialComm(job.comm)
    if not job.on_gpu:
        return job.comm, replace(job, name=name, comm=alone)
    from distgpt.gpu.stage import GpuStage

    assert isinstance(job, GpuStage)
    # New notes: the job's tell how gradients are summed.
    return job.comm, replace(job, name=name, comm=alone, gpu=gpu, notes=Notes(), transport="")

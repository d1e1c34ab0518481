"""summary.json: the speed and memory a run took, on all ranks, written when it is done."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.comm.agree import gather_ints, on_root
from distgpt.comm.cores import peak_memory
from distgpt.files import atomic_file
from distgpt.gpu.exchange import DeviceComm
from distgpt.machine.facts import environment
from distgpt.machine.stages import Stage
from distgpt.training.loop import Trainer

WARM_UP = 2  # steps that may be slower, left out of the median where enough others are there


def write_summary(trainer: Trainer, stage: Stage) -> None:
    """Collective."""
    host, gpu = gather_ints(stage.comm, peak_memory()), gather_ints(stage.comm, _gpu_memory(stage))
    found = {**_speed(trainer), "peak_memory": host, "peak_gpu_memory": gpu if any(gpu) else None}
    on_root(stage.comm, lambda: _write(trainer.directory.summary, _about(trainer, stage) | found))


def _about(trainer: Trainer, stage: Stage) -> dict[str, Any]:
    t = trainer.fitted
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "dtype": t.dtype,
        "parameters": trainer.model.layout.size,
        "batch_size": t.batch_size,
        "seq_len": trainer.model.config.seq_len,
        "grad_accum": t.grad_accum,
        "recompute": t.recompute,
        "allreduce": _allreduce(stage, t.grad_sync),
        "environment": environment(),
    }


def _allreduce(stage: Stage, grad_sync: str) -> str | None:
    if stage.comm.size == 1:
        return None
    return stage.comm.exchange.name if isinstance(stage.comm, DeviceComm) else grad_sync


def _speed(trainer: Trainer) -> dict[str, Any]:
    """Of the steps of this process; `train_s` is without evaluations, samples and checkpoints."""
    seconds = trainer.step_seconds
    tokens = trainer.fitted.batch_size * trainer.model.config.seq_len
    found = {"steps": len(seconds), "tokens": tokens * len(seconds), "train_s": sum(seconds)}
    if seconds:
        step = median(seconds[WARM_UP:] if len(seconds) > 2 * WARM_UP else seconds)
        found |= {"step_s_median": step, "first_step_s": seconds[0], "tokens_per_s": tokens / step}
    return found


def _gpu_memory(stage: Stage) -> int:
    return 0 if stage.device is None else int(stage.device.taken())


def _write(path: Path, found: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(found, indent=1).encode() + b"\n")

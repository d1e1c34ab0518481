"""summary.json: losses, the reason of the stop, and the speed and memory a run took, written at its end."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from distgpt.comm.agree import gather_ints, on_root
from distgpt.comm.cores import peak_memory
from distgpt.errors import DistgptError
from distgpt.files import atomic_file
from distgpt.gpu.exchange import DeviceComm
from distgpt.machine.facts import environment
from distgpt.machine.stages import Stage
from distgpt.saved.holder import held, release
from distgpt.training.gradsync.outer import mean_of_round
from distgpt.training.loop import Trainer

WARM_UP = 2  # steps that may be slower, left out of the median where enough others are there


def train_to_the_end(trainer: Trainer, stage: Stage) -> None:
    """Train, and write the summary whatever ends the run. Collective."""
    with held(trainer.directory.running, stage.comm):
        trainer.last_words += [
            lambda ended: write_stopped(trainer, stage, ended),
            lambda ended: release(trainer.directory.running),
        ]
        try:
            trainer.train()
        except BaseException as error:
            write_stopped(trainer, stage, error)
            raise
        write_summary(trainer, stage)


def write_summary(trainer: Trainer, stage: Stage) -> None:
    """Of a run that is done. Collective."""
    host, gpu = gather_ints(stage.comm, peak_memory()), gather_ints(stage.comm, _gpu_memory(stage))
    found = _found(trainer, stage, "finished") | {
        "peak_memory": host,
        "peak_gpu_memory": gpu if any(gpu) else None,
    }
    on_root(stage.comm, lambda: _write(trainer.directory.summary, found))


def write_stopped(trainer: Trainer, stage: Stage, error: BaseException) -> None:
    """Of a run that an error or an interruption ends, as far as rank 0 alone knows it."""
    if stage.comm.rank == 0:
        with suppress(DistgptError, OSError):  # the error itself is what the user has to see
            _write(trainer.directory.summary, _found(trainer, stage, _reason(error)))


def _reason(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else getattr(error, "stop", "failed")


def _found(trainer: Trainer, stage: Stage, stop: str) -> dict[str, Any]:
    return {**_about(trainer, stage), **_losses(trainer), **_speed(trainer), "stop": stop}


def _losses(trainer: Trainer) -> dict[str, Any]:
    """After the last step, and at the best one; None where nothing was trained or nothing is held out."""
    best = trainer.progress.best_loss
    return {
        "step": trainer.progress.step,
        "loss": _known(trainer.progress.loss),
        "val_loss": _known(trainer.progress.val_loss),
        "best_val_loss": _known(best),
        "best_step": trainer.progress.best_step,
    }


def _known(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _about(trainer: Trainer, stage: Stage) -> dict[str, Any]:
    t = trainer.fitted
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "dtype": t.dtype,
        "parameters": trainer.model.layout.elements,
        "batch_size": t.batch_size,
        "seq_len": trainer.model.config.seq_len,
        "grad_accum": t.grad_accum,
        "recompute": t.recompute,
        "allreduce": _allreduce(trainer, stage),
        "environment": environment(),
    }


def _allreduce(trainer: Trainer, stage: Stage) -> str | None:
    """As in "nccl, overlapped, bfloat16"."""
    if stage.comm.size == 1:
        return None
    t, work = trainer.fitted, trainer.work
    by = [stage.comm.exchange.name] if isinstance(stage.comm, DeviceComm) else []
    wire = [t.wire] if t.wire != "float32" else []
    return ", ".join([*by, work.summed_by if work else t.grad_sync, *wire])


def _speed(trainer: Trainer) -> dict[str, Any]:
    """Of the steps of this process; `train_s` is without evaluations, samples and checkpoints."""
    seconds = trainer.progress.seconds
    tokens = trainer.fitted.batch_size * trainer.model.config.seq_len
    found = {"steps": len(seconds), "tokens": tokens * len(seconds), "train_s": sum(seconds)}
    if seconds:
        left_out = WARM_UP if len(seconds) > 2 * WARM_UP else 0
        first = trainer.progress.step - len(seconds) + left_out
        step = mean_of_round(trainer.fitted, trainer.comm.size, first, seconds[left_out:])
        found |= {"step_s_median": step, "first_step_s": seconds[0], "tokens_per_s": tokens / step}
    return found


def _gpu_memory(stage: Stage) -> int:
    return 0 if stage.device is None else int(stage.device.taken())


def _write(path: Path, found: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(found, indent=1).encode() + b"\n")

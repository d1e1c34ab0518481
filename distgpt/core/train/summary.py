"""summary.json: losses, stop reason, speed and memory, written at the end of a run."""

from __future__ import annotations

import math
import shlex
from contextlib import suppress
from types import TracebackType

from distgpt.core.base.errors import DistgptError
from distgpt.core.base.files import write_json
from distgpt.core.comm.agree import gather, on_root
from distgpt.core.comm.resources import peak_memory
from distgpt.core.components import components
from distgpt.core.saved.checkpoint import newest_step
from distgpt.core.train.run import Run

WARM_UP = 2  # slower steps, excluded from the median if enough others exist


def write_at_end(
    run: Run, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Write the summary when the context exits, for any reason. Collective if nothing fails."""
    if error is not None:
        write_stopped(run, error)
        return
    host = gather(run.comm, peak_memory())
    gpu = gather(run.comm, run.stage.taken_memory())
    t = run.settings
    is_whole = t.train_minutes or t.patience or run.progress.step >= t.steps
    result = _found(run, "finished" if is_whole else "ended early") | {
        "peak_memory": host,
        "peak_gpu_memory": gpu if any(gpu) else None,
    }

    def write() -> None:
        # A start without steps, for example to rewrite deleted weights, has no losses to report.
        if run.progress.seconds or run.directory.finished_at() != run.progress.step:
            write_json(run.directory.summary, result)

    on_root(run.comm, write)


def write_stopped(run: Run, error: BaseException) -> None:
    """Write the summary of a failed or interrupted run, from rank 0's state."""
    if run.comm.rank == 0:
        with suppress(DistgptError, OSError):  # the user must see the original error
            run.directory.lock.refuse_taken()
            is_interrupt = isinstance(error, KeyboardInterrupt)
            stop = "interrupted" if is_interrupt else getattr(error, "stop", "failed")
            write_json(run.directory.summary, _found(run, stop))


def _found(run: Run, stop: str) -> dict[str, object]:
    """Return the current results, with None for losses that are not finite or unknown.

    `train_s` includes only this process's steps.
    """
    t, progress, best = run.settings, run.progress, run.checkpoints.best
    loss, val_loss, best_loss = (
        each if each is not None and math.isfinite(each) else None
        for each in (progress.loss, progress.val_loss, best.loss if best else None)
    )
    sent = t.gradient_dtype if t.gradient_dtype != "float32" else ""
    seconds, tokens = progress.seconds, t.batch_size * run.model.config.seq_len
    result: dict[str, object] = {
        "stage": run.stage.name,
        "ranks": run.comm.size,
        "threads": run.stage.threads,
        **run.where,
        "dtype": t.dtype,
        "parameters": run.model.layout.elements,
        "batch_size": t.batch_size,
        "seq_len": run.model.config.seq_len,
        "grad_accum": t.grad_accum,
        "recompute": t.recompute,
        # How gradients were summed, for example "overlapped, bfloat16".
        "allreduce": ", ".join(filter(None, [run.stage.transport, run.gradient_sync.name, sent]))
        if run.comm.size > 1
        else None,
        **({"environment": environment} if (environment := components().environment()) else {}),
        "step": progress.step,
        "loss": loss,
        "train_bits_per_byte": run.report.bits_per_byte(loss),
        "val_loss": val_loss,
        "bits_per_byte": run.bits_per_byte(val_loss),
        "best_val_loss": best_loss,
        "best_bits_per_byte": run.bits_per_byte(best_loss),
        "best_step": best.step if best else None,
        "steps": len(seconds),
        "tokens": tokens * len(seconds),
        "train_s": sum(seconds),
        "stop": stop,
    }
    if seconds:
        left_out = WARM_UP if len(seconds) > 2 * WARM_UP else 0
        step = run.placement.rounds.typical(progress.step - len(seconds) + left_out, seconds[left_out:])
        result |= {"step_s_median": step, "first_step_s": seconds[0], "tokens_per_s": tokens / step}
    return result


def how_to_resume(run: Run) -> str:
    """Describe to the user how to resume an interrupted run."""
    step = newest_step(run.directory.checkpoints)
    directory = run.directory
    if step is None and directory.branched_from() is None and directory.resumed_by == directory.path:
        return "nothing is saved yet (--save-every)"
    words = shlex.join(["--out", str(directory.resumed_by), "--resume", "auto"])
    return f"step {step} is saved; resume with {words}" if step else f"resume with {words}"

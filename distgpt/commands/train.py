"""distgpt train"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from distgpt.comm.launched import shown_on_terminal
from distgpt.commands.options import (
    PATH,
    given,
    on_cpu,
    parsed_duration,
    settings,
    stage_options,
    without_graphs,
    workload,
)
from distgpt.config import GpuConfig, TrainConfig
from distgpt.errors import command_line, harmless, printable
from distgpt.machine.stages import Stage, open_stage
from distgpt.training.timelimit import TimeLimit, ending
from distgpt.units import count


@click.command()
@stage_options
@workload
@settings
@click.option("--out", type=PATH, help="Run directory; runs/<preset> if left out.")
@click.option(
    "--resume",
    metavar="auto|PATH",
    help="Resume from the newest checkpoint in --out, or from PATH, a run or a checkpoint.",
)
@click.option(
    "--time-limit",
    metavar="TIME",
    callback=parsed_duration,
    help="As 3h50m: save and leave with 75 in time. In a job of Slurm 23.02, its own limit if left out.",
)
@click.option(
    "--stall-timeout",
    metavar="TIME",
    callback=parsed_duration,
    help="Without progress for so long, say which rank is where.  [default: 10 steps, at least 2m]",
)
@click.option(
    "--stall-abort",
    metavar="TIME",
    callback=parsed_duration,
    help="Without progress for so long, save if possible and leave with 75.  [default: never]",
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "live", "plain"]),
    default="auto",
    show_default=True,
    help="A live display or plain lines; auto: live on a terminal.",
)
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events into the run directory.")
@click.option(
    "--profile", is_flag=True, help="Report at the end where the time went, as `distgpt profile` does."
)
def train(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: str | None,
    time_limit: float | None,
    stall_timeout: float | None,
    stall_abort: float | None,
    progress: str,
    tensorboard: bool,
    profile: bool,
    **flags: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then the flags here. A run that resumes
    has its own settings, changed by these.
    """
    end = ending(time_limit)
    gpu, flags = on_cpu(stage, gpu, flags)
    ready = open_stage(stage, threads, without_graphs(stage, gpu) if profile else gpu)

    from distgpt.saved.holder import release
    from distgpt.show.display import listeners
    from distgpt.training.gradsync.outer import buffers_saved
    from distgpt.training.open import open_run
    from distgpt.training.plan import make_plan
    from distgpt.training.summary import train_to_the_end
    from distgpt.training.watch import Stall

    shown = listeners(ready.comm, progress, tensorboard)
    plan = trainer = session = None
    try:
        plan = make_plan(ready.comm, preset, config, given(flags), out, resume, shown.noted)
        trainer = open_run(plan, ready, shown)
        if end is not None and ready.comm.rank == 0:
            buffers = buffers_saved(trainer.fitted, ready.comm.size, is_common=False)
            trainer.limit = TimeLimit(end, 4 * buffers * trainer.model.layout.size)
        trainer.stall = Stall(stall_timeout, stall_abort)
        trainer.last_words.append(lambda ended: ended.add_note(_way_on(trainer)))
        session = _profiled(trainer, ready) if profile else None
        train_to_the_end(trainer, ready)
        if session:
            shown.close()
            session.finish(trainer.directory.path, click.echo)
    except KeyboardInterrupt as interrupt:
        shown.close()
        if trainer:
            interrupt.add_note(_way_on(trainer))
        if trainer and session:
            session.salvage(trainer.directory.path, click.echo)
        raise
    finally:
        shown.close()
        if plan and ready.comm.rank == 0:  # where it ends before it trains, a job's abort does nothing else
            release(plan.directory.running)
    if ready.comm.rank == 0:
        _report(trainer)


def _profiled(trainer: Any, stage: Stage) -> Any:
    """Start measuring the run's own steps, after the first ones."""
    from distgpt.measure.profile.session import Session

    session = Session(stage, trainer.model, trainer.fitted)
    trainer.watch = session.watch
    return session


def _way_on(trainer: Any) -> str:
    """How an interrupted run resumes."""
    from distgpt.saved.checkpoint import newest_step

    directory = trainer.directory
    step = newest_step(directory.checkpoints)
    if step is None and directory.branched_from() is None:
        return f"nothing was saved yet: checkpoints are written {_how_often(trainer.run.train)}"
    words = shlex.join(["--out", str(directory.path), "--resume", "auto"])
    return f"step {step} is saved: resume with {words}" if step else f"resume with {words}"


def _how_often(t: TrainConfig) -> str:
    if t.save_every:
        return f"every {count(t.save_every, 'step')} (--save-every)"
    return f"every {t.save_minutes:g} minutes (--save-every)" if t.save_minutes else "at the end"


def _report(trainer: Any) -> None:
    """Print a sample, where the results are, and what to do next."""
    from distgpt.training.sampling import sample

    directory = trainer.directory
    is_best_known = math.isfinite(trainer.progress.best_loss)
    text = sample(trainer.model, trainer.tokenizer, 0, 240).strip()
    click.echo(f"\n{harmless(text) if shown_on_terminal(sys.stdout) else text}\n")
    click.echo(f"weights   {printable(str(directory.weights))}")
    if is_best_known:
        at = f" at step {trainer.progress.best_step}" if trainer.progress.best_step is not None else ""
        loss = f"validation loss {trainer.progress.best_loss:.4f}{at}"
        click.echo(f"best      {printable(str(directory.best))} ({loss})")
    click.echo(f"metrics   {printable(str(directory.metrics))}")
    weights = directory.best if is_best_known else directory.weights
    spoken = [word for word in text.split() if word.isalpha() and len(word) <= 20]
    prompt = next((word for word in spoken if len(word) > 2), spoken[0] if spoken else "a")
    words = ("infer", "--weights", weights, "--prompt", prompt)
    click.echo(f"next      {printable(command_line(*words))}")

"""distgpt train"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import files, names_or_files
from distgpt.commands.help import command, option
from distgpt.commands.options import (
    PATH,
    deterministic_as_parts,
    dial_options,
    parsed_duration,
    preset_options,
    set_by_user,
    settings,
    stage_options,
    without_graphs,
)
from distgpt.core.base.errors import Say, command_line, escape, escape_model_text
from distgpt.core.base.formatting import loss_and_bits, parse_duration
from distgpt.core.base.tables import COMPONENTS, imported, part
from distgpt.core.comm.batch import job_end
from distgpt.core.comm.launched import launched_as, shown_on_terminal
from distgpt.core.config import GpuConfig
from distgpt.core.config.asked import Asked, asked_for, resolve
from distgpt.core.config.presets import DEFAULT_PRESET
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.data.named import resolve_data

_schedule, _saving = partial(option, group="schedule"), partial(option, group="saving")
_trouble, _display = partial(option, group="trouble"), partial(option, group="display")

CHOOSES_MODEL = {"init", "chats", "n_layer", "n_embd"}


@command(example="distgpt train --data my.txt --within 30m")
@stage_options
@preset_options
@settings
@_saving("--out", first=True, type=PATH, help="Write the run into this directory. [default: runs/<preset>]")
@_saving(
    "--resume",
    first=True,
    metavar="auto|PATH",
    shell_complete=names_or_files("auto"),
    help="Resume from the newest checkpoint in --out, or from PATH, a run or a checkpoint.",
)
@_schedule(
    "--decay-from",
    metavar="PATH",
    shell_complete=files,
    help="Begin a new run with a checkpoint, or a run's newest one, whose learning rate is constant, and let"
    " it fall linearly over the next --steps.",
)
@dial_options
@_saving(
    "--time-limit",
    metavar="TIME",
    callback=parsed_duration,
    help="Save and exit with 75 before this time (as 3h50m) is over. [default: the limit of a Slurm job]",
)
@_trouble(
    "--stall-timeout",
    metavar="TIME",
    callback=parsed_duration,
    help="After this long without progress, say which rank is where. [default: 10 steps, at least 2m]",
)
@_trouble(
    "--stall-abort",
    metavar="TIME",
    callback=parsed_duration,
    help="After this long without progress, save if possible and exit with 75. [default: never]",
)
@_display(
    "--progress",
    type=click.Choice(["auto", "live", "plain"]),
    default="auto",
    show_default=True,
    help="Show a live display or plain lines. auto: live on a terminal.",
)
@_display(
    "--log-lines",
    metavar="TIME",
    callback=parsed_duration,
    help="Write a plain line about the progress this often (as 5m). [default: 2s, after half a minute 10s;"
    " in a batch job 30s]",
)
@_display("--tensorboard", is_flag=True, help="Also write TensorBoard events into the run directory.")
@_display(
    "--profile", is_flag=True, help="At the end, report where the time went, as `distgpt profile` does."
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
    log_lines: float | None,
    tensorboard: bool,
    profile: bool,
    **flags: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then the flags here. A run that resumes
    has its own settings, changed by these.
    """
    asked = asked_for(set_by_user(flags), preset, config, out, resume)
    if (time_limit, stall_timeout, stall_abort) != (None, None, None):
        COMPONENTS.get("guards")  # raises an error where they are missing
    if launched_as() == 1:
        _refuse_early(asked)
    end = job_end(time_limit)
    gpu, asked = deterministic_as_parts(stage, gpu, asked)
    ready = open_stage(stage, threads, without_graphs(stage, gpu) if profile else gpu)

    from distgpt.core.train.lines import listeners
    from distgpt.core.train.loop import train as train_run
    from distgpt.core.train.plan import make_plan, without_recipes
    from distgpt.core.train.resume import leave_finished
    from distgpt.core.train.run import plain_seams
    from distgpt.core.train.setup import open_run
    from distgpt.core.train.sharing import Strategy
    from distgpt.core.train.summary import how_to_resume

    shown = listeners(ready.comm, progress, tensorboard, log_lines)
    plan = run = session = None
    try:
        note_small_model(ready, asked, shown.noted)
        asked = part("recipes", without_recipes)(asked, ready, shown.noted)
        plan = make_plan(ready, asked, shown.noted)
        if plan.is_finished:
            t, seconds = plan.config.train, plan.state.seconds
            leave_finished(ready.comm, plan.directory, t, seconds, shown.noted)
            return
        seams = part("seams", plain_seams)(plan.config.train, end, stall_timeout, stall_abort)
        run = open_run(plan, ready, part("strategy", Strategy), shown, seams)
        if profile:
            run, session = _profiled(run)
        train_run(run)
        if session:
            shown.close()
            session.finish(run.directory.path, click.echo)
    except KeyboardInterrupt as interrupt:
        shown.close()
        if run:
            interrupt.add_note(how_to_resume(run))
        if run and session:
            session.salvage(run.directory.path, click.echo)
        raise
    finally:
        shown.close()
        if plan and ready.comm.rank == 0:  # before it trains: MPI's abort skips all other cleanup
            plan.directory.lock.release()
    if ready.comm.rank == 0:
        _report(run)


def _refuse_early(asked: Asked) -> None:
    """Refuse what makes no sense before NumPy and Numba are imported, which takes a second."""
    if asked.resume is not None or asked.decay_from is not None:
        return
    known = asked.settings()
    if asked.within is not None:
        parse_duration(asked.within)
    elif asked.depth is None and "init" not in known:  # whose models are not known yet
        resolve(asked)
    for name in () if known.get("chats") else ("data", "val"):
        if text := known.get(name):
            resolve_data(str(text))


def _profiled(run: Any) -> Any:
    """Return the run with a session that launches its steps and measures them, after the first ones."""
    make = imported("distgpt.measure.profile.session:Session", "--profile")
    session = make(run.stage, run.step, run.settings)
    return replace(run, launch=session.profiler.launch), session


def _losses(run: Any) -> str:
    """Return the losses of the last step and of the last evaluation, as far as there are any."""
    bits = {"training": run.report.reading.bits_per_byte, "validation": run.assessment.bits_per_byte}
    known = {"training": run.progress.loss, "validation": run.progress.val_loss}
    return ", ".join(
        f"{name} {loss_and_bits(loss, bits[name](loss))}" for name, loss in known.items() if loss is not None
    )


def _report(run: Any) -> None:
    """Print a sample, where the results are, and what to do next."""
    from distgpt.core.train.report import sample, word_of_text

    directory, best, talks = run.directory, run.checkpoints.best, run.config.train.chats
    length = 60 if run.settings.lora_rank else 240  # with adapters a token makes all matrices
    text = "" if talks else sample(run.model, run.tokenizer, 0, length).strip()
    click.echo(f"\n{escape_model_text(text) if shown_on_terminal(sys.stdout) else text}\n" * (not talks))
    if losses := _losses(run):
        click.echo(f"losses    {losses}")
    click.echo(f"weights   {escape(str(directory.weights))}")
    if best:
        at = f" at step {best.step}" if best.step is not None else ""
        loss = loss_and_bits(best.loss, run.assessment.bits_per_byte(best.loss))
        click.echo(f"best      {escape(str(directory.best))}: validation loss {loss}{at}")
    click.echo(f"metrics   {escape(str(directory.metrics))}")
    weights = directory.best if best else directory.weights
    word = "" if talks else word_of_text(run.batches, run.tokenizer)
    words = ("chat" if talks else "infer", "--weights", weights, *(["--prompt", word] if word else []))
    click.echo(f"next      {escape(command_line(*words))}")


def note_small_model(stage: Stage, asked: Asked, say: Say) -> None:
    """Suggest a larger model than the default one for a GPU. For all ranks."""
    by_recipe = asked.depth or asked.within or asked.decay_from
    is_chosen = by_recipe or asked.preset or asked.toml or asked.resume or asked.given.keys() & CHOOSES_MODEL
    if not stage.on_gpu or stage.comm.rank or is_chosen:
        return
    # The bundled text is read too fast: five minutes of it would be learned by heart.
    own = "" if "data" in asked.given else "with a text of your own (--data) "
    say(f"{DEFAULT_PRESET} is small for a GPU: {own}--within 5m chooses what learns most in 5 minutes")

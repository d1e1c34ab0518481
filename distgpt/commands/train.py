"""distgpt train"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

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
)
from distgpt.commands.watch_options import watch_options
from distgpt.core.base import interrupts
from distgpt.core.base.errors import Say, command_line, escape, escape_model_text, refuse_beside
from distgpt.core.base.formatting import clock, count, loss_and_bits, parse_duration
from distgpt.core.base.tables import COMPONENTS, MissingComponent, part
from distgpt.core.comm.job import shown_on_terminal, this_job
from distgpt.core.config import GpuConfig, RunConfig
from distgpt.core.config.asked import Asked, asked_for, resolve
from distgpt.core.config.presets import DEFAULT_PRESET
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.textfile import resolve_data

_schedule, _saving = partial(option, group="schedule"), partial(option, group="saving")
_trouble, _display = partial(option, group="trouble"), partial(option, group="display")

LOOKED_AT = 2000  # tokens of the text, of which a word is shown
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
    completes="resume",
    help="Resume from the newest checkpoint in --out, or from PATH, a run or a checkpoint.",
)
@_schedule(
    "--decay-from",
    metavar="PATH",
    completes="file",
    help="Begin a new run with a checkpoint, or a run's newest one, whose learning rate is constant, and let"
    " it fall linearly over the next --steps.",
)
@dial_options
@_saving(
    "--time-limit",
    metavar="TIME",
    callback=parsed_duration,
    help="Save and exit with 75 before this time (as 3h50m) is over. [default: the batch job's, if known]",
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
@watch_options
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
    log_format: str,
    recorders: list[Callable[[], Any]],
    **flags: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then the flags here. A run that resumes
    has its own settings, changed by these.
    """
    given = set_by_user(flags)
    asked = asked_for(given, preset, config, out, resume)
    if given.get("train_minutes"):
        ends = {name: given.get(name) for name in ("steps", "epochs")}
        refuse_beside("--set train_minutes", ends, "each says when a run ends")
    if (time_limit, stall_timeout, stall_abort) != (None, None, None):
        COMPONENTS.get("guards")  # raises an error where they are missing
    if log_format == "json":
        refuse_beside("--log-format json", {"progress live": progress == "live"}, "a log has no display")
    job = this_job()
    if job.size == 1:
        _refuse_early(asked)
    end = job.end(time_limit)
    gpu, asked = deterministic_as_parts(stage, gpu, asked)
    ready = open_stage(stage, threads, gpu)

    from distgpt.core.train.lines import listeners
    from distgpt.core.train.loop import train as train_run
    from distgpt.core.train.plan import make_plan, with_dtype
    from distgpt.core.train.resume import leave_finished
    from distgpt.core.train.run import plain_seams
    from distgpt.core.train.setup import open_run
    from distgpt.core.train.summary import how_to_resume

    display = "json" if log_format == "json" else progress
    shown = listeners(ready.comm, display, log_lines, recorders)
    plan = run = None

    def remove_unbegun() -> None:
        if plan and not plan.checkpoint and not (run and run.progress.step):
            plan.directory.remove_unbegun()

    interrupts.before_leaving.append(remove_unbegun)
    try:
        if ready.comm.rank == 0:
            if ready.on_gpu:
                note_small_model(asked, shown.noted)
            if end is not None:
                note_unguarded(shown.noted)
        if asked.has_recipes:
            from distgpt.recipes.recipes import followed

            asked = followed(asked, ready, shown.noted)
        asked = with_dtype(asked, ready, shown.noted)  # a recipe may have named one
        plan = make_plan(ready, asked, shown.noted)
        if plan.is_finished:
            t, seconds = plan.config.train, plan.state.seconds
            leave_finished(ready.comm, plan.directory, t, seconds, shown.noted)
            return
        seams = part("seams", plain_seams)(plan.config.train, end, stall_timeout, stall_abort)
        run = open_run(plan, ready, shown, seams)
        train_run(run)
    except KeyboardInterrupt as interrupt:
        shown.close()
        if run:
            interrupt.add_note(how_to_resume(run))
        remove_unbegun()
        raise
    finally:
        interrupts.before_leaving.remove(remove_unbegun)
        shown.close()
        if plan and ready.comm.rank == 0:  # before it trains: MPI's abort skips all other cleanup
            plan.directory.lock.release()
    if ready.comm.rank == 0:
        _report(run, asked, as_json=log_format == "json")


def resuming(asked: Mapping[str, Any], out: Path) -> list[str]:
    """Return the options that let a job resume whenever it is started, also where it has yet to begin."""
    if asked["resume"]:
        return []
    named = {**asked, **asked["assigned"]}
    is_named = out.exists() or any(map(named.get, ("data", "preset", "config", "depth", "init")))
    return [*([] if is_named else ["--data", RunConfig().train.data]), "--resume", "auto"]


def _refuse_early(asked: Asked) -> None:
    """Refuse what makes no sense before NumPy and Numba are imported, which takes a second."""
    asked.refuse_mistyped()
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


def _losses(run: Any) -> str:
    """Return the losses of the last step and of the last evaluation, as far as there are any."""
    bits = {"training": run.report.reading.bits_per_byte, "validation": run.bits_per_byte}
    known = {"training": run.progress.loss, "validation": run.progress.val_loss}
    return ", ".join(
        f"{name} {loss_and_bits(loss, bits[name](loss))}" for name, loss in known.items() if loss is not None
    )


def _report(run: Any, asked: Asked, as_json: bool) -> None:
    """Print a sample of the best weights, where the results are, and what to do next. For rank 0."""
    from distgpt.core.comm.serial import SerialComm
    from distgpt.core.saved.tensors import read_into
    from distgpt.core.train.lines import LISTENERS, wrapped
    from distgpt.core.train.sampling import sample

    def show(label: str, text: str) -> None:
        click.echo(wrapped(f"{label:<10}{escape(text)}", sys.stdout))

    directory, best, talks = run.directory, run.checkpoints.best, run.config.train.chats
    has_risen = best is not None and best.step not in (None, run.progress.step)
    if has_risen:
        run.optimizer_state.load_weights(SerialComm(), partial(read_into, directory.best))
    length = 60 if run.settings.lora_rank else 240  # with adapters a token makes all matrices
    text = "" if talks else sample(run.model, run.tokenizer, 0, length).strip()
    if as_json and text:  # one object, and not one for each of its lines
        LISTENERS["json"]().sampled(best.step if has_risen else run.progress.step, text)
    elif not talks:
        click.echo(f"\n{escape_model_text(text) if shown_on_terminal(sys.stdout) else text}\n")
    if losses := _losses(run):
        show("losses", losses)
    if asked.tokens:
        from distgpt.recipes.within import outcome

        if told := outcome(asked.expected_bits, run):
            show("expected", told)
    if seconds := run.progress.seconds:
        rate = run.settings.batch_size * run.model.config.seq_len * len(seconds) / sum(seconds)
        took, steps = clock(time.monotonic() - run.stage.begun), count(len(seconds), "step")
        show("took", f"{took} for {steps}, {rate:,.0f} tokens/s on average")
    show("weights", str(directory.weights))
    if best:
        at = f" at step {best.step}" if best.step is not None else ""
        loss = loss_and_bits(best.loss, run.bits_per_byte(best.loss))
        whole = run.assessment.validation.held_out
        of = f", over {best.tokens:,} of {whole:,} held-out tokens" if best.tokens < whole else ""
        show("best", f"{directory.best}: validation loss {loss}{at}{of}")
        first = run.progress.first_val_loss
        if first is not None and best.loss >= first:
            show("note", "nothing was learned: the validation loss was as low before the first step")
        elif has_risen:
            show("note", f"validation has risen since step {best.step}: the best weights are from there")
    show("metrics", str(directory.metrics))
    weights = directory.best if best else directory.weights
    word = "" if talks else _words_of_text(run)
    words = ("chat" if talks else "infer", "--weights", weights, *(["--prompt", word] if word else []))
    click.echo(f"next      {escape(command_line(*words))}")


def note_unguarded(say: Say) -> None:
    """Say that nothing saves before the end of a batch job, where guards are not installed."""
    try:
        COMPONENTS.get("guards")
    except MissingComponent as error:
        say(f"this run will not save before its batch job ends: {error}")


def _words_of_text(run: Any) -> str:
    """Return two words of the training text, or one, for a prompt; "" if none is found at once."""
    from distgpt.core.data.batches import SAMPLE_PIECE

    ids = run.batches.sample(SAMPLE_PIECE)[:LOOKED_AT]
    text, word = run.tokenizer.decode(ids.tolist()), r"[^\W\d_]{3,20}"
    found = re.search(rf"(?<=\s){word} {word}(?=\s)", text) or re.search(rf"(?<=\s){word}(?=\s)", text)
    return found[0] if found else ""


def note_small_model(asked: Asked, say: Say) -> None:
    """Suggest a larger model for a GPU than the default one, if nobody has chosen one."""
    by_recipe = asked.depth or asked.within or asked.decay_from
    is_chosen = by_recipe or asked.preset or asked.toml or asked.resume or asked.given.keys() & CHOOSES_MODEL
    if is_chosen:
        return
    # The bundled text is read too fast: five minutes of it would be learned by heart.
    own = "" if "data" in asked.given else "with a text of your own (--data) "
    say(f"{DEFAULT_PRESET} is small for a GPU: {own}--within 5m chooses what learns most in 5 minutes")

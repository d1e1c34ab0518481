"""distgpt train and tune"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distgpt.assembly import COMPONENTS, load_components
from distgpt.commands.help import Option, command, option
from distgpt.commands.options import (
    PATH,
    TIME,
    asked_by,
    files,
    names_or_files,
    preset_options,
    setting_option,
    settings,
    sizing_options,
    stage_options,
)
from distgpt.core.base import interrupts
from distgpt.core.base.errors import UsageError, command_line, escape, escape_model_text, reject_combination
from distgpt.core.base.formatting import clock, count, loss_and_bits
from distgpt.core.comm.job import shown_on_terminal, this_job
from distgpt.core.components import install
from distgpt.core.config import SETTINGS, GpuConfig, ModelConfig, RunConfig, settings_of
from distgpt.core.config.run_request import RunRequest, resolve
from distgpt.core.cpu.stages import open_stage

if TYPE_CHECKING:
    from distgpt.core.comm.api import Comm
    from distgpt.core.cpu.stages import Stage
    from distgpt.core.train.interfaces import Listener
    from distgpt.core.train.lines import Listeners
    from distgpt.core.train.plan import Plan
    from distgpt.core.train.run import Limits, Run
    from distgpt.recipes.ensemble import Ensemble

_schedule, _saving = partial(option, group="schedule"), partial(option, group="saving")
_trouble, _display = partial(option, group="trouble"), partial(option, group="display")

SHOWN = ("progress", "log_lines", "log_format", "tensorboard", "metrics_textfile", "metrics_port")


def _replace_components(context: click.Context, param: click.Parameter, name: str | None) -> None:
    if name and not context.resilient_parsing:
        os.environ[COMPONENTS] = name  # child processes read this
        install(load_components(name))


def _begin_log(context: click.Context, param: click.Parameter, value: str) -> str:
    """Switch to JSON before other options are parsed, so that their errors are objects as well.

    Without a parent context, another command (`distgpt submit`) only parses these options.
    """
    if value == "json" and context.parent and not context.resilient_parsing:
        write_json(context)
    return value


def write_json(context: click.Context, *how: str) -> None:
    """Write all further output of this command as JSON. `how`: see callbacks/structured.py."""
    from distgpt.callbacks.structured import as_json

    context.find_root().with_resource(as_json(*how))


@command(example="distgpt train --data my.txt --within 30m")
@stage_options
@preset_options
@settings
@_saving("--out", first=True, type=PATH, help="Run directory. [default: runs/<preset>]")
@_saving(
    "--resume",
    first=True,
    metavar="auto|PATH",
    shell_complete=names_or_files("auto"),
    help="Resume from the newest checkpoint in --out (auto), or from a run or checkpoint (PATH).",
)
@_schedule(
    "--decay-from",
    metavar="PATH",
    shell_complete=files,
    help="Start a new run from a checkpoint (or a run's newest) with a constant learning rate; decay it"
    " linearly over --steps.",
)
@sizing_options
@_saving("--time-limit", type=TIME, help="Save and exit with 75 before this time. [default: the job's]")
@_trouble(
    "--stall-timeout", type=TIME, help="Report a stall after this time. [default: 10 steps, at least 2m]"
)
@_trouble("--stall-abort", type=TIME, help="Save and exit with 75 after this stall. [default: never]")
@_display("--progress", type=click.Choice(["auto", "live", "plain"]), default="auto")
@_display(
    "--log-lines", type=TIME, help="Time between log lines. [default: 2s, then 10s; in a batch job 30s]"
)
@_display(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    is_eager=True,
    callback=_begin_log,
    help="Log format: plain text, or a JSON object per line with time, level, host, rank and event.",
)
@_display("--tensorboard", is_flag=True, help="Write TensorBoard events to the run directory.")
@_display("--metrics-textfile", type=PATH, help="Write Prometheus metrics to this file (.prom) or directory.")
@_display(
    "--metrics-port",
    metavar="[ADDRESS:]PORT",
    help="Serve Prometheus metrics at this address on rank 0. [default address: 127.0.0.1]",
)
@option(
    "--components",
    group="computing",
    metavar="MODULE:CLASS",
    is_eager=True,
    expose_value=False,
    callback=_replace_components,
    help="Extend distgpt with your own class (distgpt help seams). Other commands read DISTGPT_COMPONENTS.",
)
def train(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    time_limit: float | None,
    stall_timeout: float | None,
    stall_abort: float | None,
    dry_run: bool = False,
    **flags: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then options. A resumed run keeps its
    settings unless options change them.
    """
    display = {name: flags.pop(name) for name in SHOWN}
    gpu, request = asked_by(stage, gpu, flags)
    if request.given.get("train_minutes"):
        ends = {name: request.given.get(name) for name in ("steps", "epochs")}
        reject_combination("--set train_minutes", ends, "both set the end of the run")
    if as_json := display["log_format"] == "json":
        is_live = display["progress"] == "live"
        reject_combination("--log-format json", {"progress live": is_live}, "a JSON log has no live display")
    job = this_job()
    if job.size == 1:
        _refuse_early(request)
    end = job.end(time_limit)
    ready = open_stage(stage, threads, gpu)

    from distgpt.core.train.plan import make_plan
    from distgpt.core.train.run import Limits
    from distgpt.recipes import followed

    limits = Limits(end, stall_timeout, stall_abort)
    shown = _listeners(ready.comm, display)
    result = run = None
    try:
        request = followed(request, ready, shown.noted)
        plan = make_plan(ready, request, shown.noted)
        train_planned = partial(_train_planned, shown, limits)
        if plan.config.train.ensemble > 1:
            from distgpt.recipes.ensemble import train_ensemble

            result = train_ensemble(plan, ready, train_planned, shown.noted)
        elif not dry_run and not plan.is_finished:
            run = train_planned(plan, ready)
        if not result and not run:
            _leave(plan, ready, shown, dry_run)
    finally:
        shown.close()
    if ready.comm.rank == 0 and result:
        _report_ensemble(result, plan, request, as_json, time.monotonic() - ready.begun)
    elif ready.comm.rank == 0 and run:
        _report(run, request, as_json)


def _train_planned(shown: Listeners, limits: Limits, plan: Plan, ready: Stage) -> Run:
    """Train a model. Collective."""
    from distgpt.core.train.loop import train as train_run
    from distgpt.core.train.setup import open_run
    from distgpt.core.train.summary import how_to_resume

    run = None

    def remove_unbegun() -> None:
        if not plan.checkpoint and not (run and run.progress.step):
            plan.directory.remove_unbegun()

    interrupts.before_leaving.append(remove_unbegun)
    try:
        run = open_run(plan, ready, shown, limits)
        train_run(run)
    except KeyboardInterrupt as interrupt:
        shown.close()
        if run:
            interrupt.add_note(how_to_resume(run))
        remove_unbegun()
        raise
    finally:
        interrupts.before_leaving.remove(remove_unbegun)
        if ready.comm.rank == 0:  # before training: MPI's abort skips all other cleanup
            plan.directory.lock.release()
    return run


def _leave(plan: Plan, stage: Stage, shown: Listeners, dry_run: bool) -> None:
    """Print what a dry run shows, or that the run is finished. Collective."""
    if dry_run:
        from distgpt.show.tuned import dry_run as show

        show(plan, stage, shown.noted)
        return
    from distgpt.core.train.resume import leave_finished

    leave_finished(stage.comm, plan.directory, plan.config.train, plan.state.seconds, shown.noted)


def _listeners(comm: Comm, display: Mapping[str, Any]) -> Listeners:
    """Return the listeners of a run on rank 0: its display and its recorders. Collective."""
    from distgpt.core.comm.agree import on_every_rank
    from distgpt.core.train.lines import Lines, Listeners

    progress, log_lines = display["progress"], display["log_lines"]  # log_lines: seconds between lines

    def chosen() -> list[Listener]:
        if comm.rank:
            return []
        result: list[Listener] = []
        # Some launchers give their ranks a terminal that no user watches.
        is_live = progress == "live" or (progress == "auto" and comm.size == 1 and sys.stdout.isatty())
        if display["log_format"] == "json":
            from distgpt.callbacks.structured import JsonLines

            result.append(JsonLines(log_lines))
        elif is_live:
            from distgpt.show.display import Live

            result.append(Live(log_lines))
        else:
            result.append(Lines(log_lines))
        if (path := display["metrics_textfile"]) is not None:
            from distgpt.callbacks.exporter import Textfile

            result.append(Textfile(path))
        if (port := display["metrics_port"]) is not None:
            from distgpt.callbacks.exporter import Port

            result.append(Port(port))
        if display["tensorboard"]:
            from distgpt.show.display import TensorBoard

            result.append(TensorBoard())
        return result

    return Listeners(*on_every_rank(comm, chosen))


def resuming(request: Mapping[str, Any], out: Path) -> list[str]:
    """Return the options that make a job resume at any start, including its first."""
    if request["resume"]:
        return []
    named = {**request, **request["assigned"]}
    is_named = out.exists() or any(map(named.get, ("data", "preset", "config", "depth", "init")))
    return [*([] if is_named else ["--data", RunConfig().train.data]), "--resume", "auto"]


def _refuse_early(request: RunRequest) -> None:
    """Reject mistyped settings before NumPy and Numba are imported, which takes a second."""
    request.refuse_mistyped()
    derived = (
        request.resume,
        request.decay_from,
        request.within,
        request.depth,
        request.family,
        request.settings().get("init"),
    )
    if not any(derived):  # otherwise the model is not known yet
        resolve(request)


def show(label: str, text: str) -> None:
    click.echo(f"{label:<10}{escape(text)}")


def _report_ensemble(
    result: Ensemble, plan: Plan, request: RunRequest, as_json: bool, seconds: float
) -> None:
    """Print a sample of an ensemble, its losses, and the next command. Only on rank 0."""
    from distgpt.core.generate.engine import sample
    from distgpt.recipes.within import outcome_of_ensemble

    size, path, run = plan.config.train.ensemble, plan.directory.ensemble, result.last
    if run:
        _show_sample(sample(result.model, run.tokenizer, 0, 240).strip(), run.progress.step, as_json)
    if result.loss is not None and run and (bits := run.bits_per_byte(result.loss)):
        ends = sorted(result.losses)[:: max(1, len(result.losses) - 1)]  # the lowest and the highest
        alone = f"; of each model alone {' to '.join(f'{loss:.4f}' for loss in ends)}" if ends else ""
        show("losses", f"validation {loss_and_bits(result.loss, bits)}{alone}")
        if request.expected_bits:
            show("predicted", outcome_of_ensemble(request.expected_bits, run, size, bits))
    took = f"{clock(seconds)} for {count(result.trained, 'model')}"
    show("took", took if result.trained == size else f"{took} of {size}")
    show("weights", str(path))
    click.echo(f"next      {escape(command_line('infer', '--weights', path))}")


def _show_sample(text: str, step: int, as_json: bool) -> None:
    if as_json and text:  # one object, not one per line
        from distgpt.callbacks.structured import JsonLines

        JsonLines().sampled(step, text)
    elif not as_json:
        click.echo(f"\n{escape_model_text(text) if shown_on_terminal(sys.stdout) else text}\n")


def _report(run: Any, request: RunRequest, as_json: bool) -> None:
    """Print a sample of the best weights, the paths of the results, and the next command. Only on rank 0."""
    from distgpt.core.comm.api import SerialComm
    from distgpt.core.generate.engine import sample
    from distgpt.core.saved.tensors import read_into

    directory, best, talks = run.directory, run.checkpoints.best, run.config.train.chats
    has_risen = best is not None and best.step not in (None, run.progress.step)
    if has_risen:
        run.optimizer_state.load_weights(SerialComm(), partial(read_into, directory.best))
    length = 60 if run.settings.lora_rank else 240  # adapters recompute all matrices for each token
    text = "" if talks else sample(run.model, run.tokenizer, 0, length).strip()
    if not talks:
        _show_sample(text, best.step if has_risen else run.progress.step, as_json)
    losses = (
        ("training", run.progress.loss, run.report.bits_per_byte),
        ("validation", run.progress.val_loss, run.bits_per_byte),
    )
    known = [f"{name} {loss_and_bits(loss, bits(loss))}" for name, loss, bits in losses if loss is not None]
    if known:
        show("losses", ", ".join(known))
    if request.tokens or run.settings.within_minutes:
        from distgpt.recipes.within import outcome

        label, told = outcome(request.expected_bits, run)
        if told:
            show(label, told)
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
        first = run.progress.first_val_loss
        before = "" if first is None else f", {first:.4f} before the first step"
        show("best", f"{directory.best}: validation loss {loss}{at}{before}{of}")
        if first is not None and best.loss >= first:
            show("note", "no improvement: the validation loss was as low before the first step")
        elif has_risen:
            show(
                "note",
                f"validation loss has risen since step {best.step}, which has the best weights",
            )
    show("metrics", str(directory.metrics))
    if talks and not as_json:
        from distgpt.show.tuned import compare

        compare(run)
    weights = directory.best if best else directory.weights
    click.echo(f"next      {escape(command_line('chat' if talks else 'infer', '--weights', weights))}")


# Options of train that do not apply: the weights determine the model, and chats have their own format.
UNUSED = {
    *(settings_of(ModelConfig).keys() - {"seq_len"}),
    *("data", "tokenizer", "pack", "init"),
    *("preset", "decay_from", "depth", "within"),
}


def as_train(weights: Path | None, data: str | None, **options: Any) -> dict[str, Any]:
    if options["resume"] is None and (weights is None or data is None):
        raise UsageError("tune requires --weights, the model, and --data, the chats")
    own = {"chats": True, "init": None if weights is None else str(weights), "data": data}
    return {**dict.fromkeys(option.name or "" for option in train.params), **options, **own}


def _one_source(context: click.Context, param: click.Parameter, sources: Sequence[str]) -> str | None:
    if len(sources) > 1:
        raise UsageError("tune reads one --data; put several files into a directory and name that")
    return sources[0] if sources else None


@command(example="distgpt tune --weights model.safetensors --data chats.jsonl --out runs/tuned")
@click.option("--weights", type=PATH, help="Model to tune: weights file, run, or hub:ORG/NAME.")
@click.option(
    "--data",
    multiple=True,
    callback=_one_source,
    shell_complete=files,
    help="Chats to train on (.jsonl, .jsonl.gz, .json, .csv, .tsv), texts (.txt, .md), or a directory.",
)
@setting_option("epochs", replace(SETTINGS["epochs"], first=True), default=None)
@click.option(
    "--dry-run", is_flag=True, help="Show examples and the expected time, then exit without training."
)
def tune(**options: Any) -> None:
    """Fine-tune a model on chats. Trains only on the answers.

    A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]},
    {"prompt": "...", "completion": "..."} or another format listed in docs/how-to/tuning.md. Defaults: 3
    epochs, with a learning rate for pretrained weights.
    """
    assert train.callback is not None
    train.callback(**as_train(**options))


tune.params += [copy(option) for option in train.params if option.name not in UNUSED]
for _option in tune.params:
    if isinstance(_option, Option) and _option.name in ("lora_rank", "lora_base"):
        _option.first = True  # list adapters on the first page of help

"""distgpt profile"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.commands.help import command
from distgpt.commands.options import (
    PATH,
    deterministic_as_parts,
    preset_options,
    set_by_user,
    settings_but,
    stage_options,
    without_graphs,
)
from distgpt.core.base.errors import Say, print_lines
from distgpt.core.config import GpuConfig, parse_toml
from distgpt.core.config.asked import asked_for
from distgpt.core.cpu.stages import open_stage

# Settings of training that mean something else here, or concern what happens between steps.
UNUSED = (
    *("--steps", "--save-every", "--sample-every", "--eval-every"),
    *("--val-tokens", "--hellaswag", "--save", "--on-bad-step"),
)


@command(example="distgpt profile --preset gpt-mini --steps 20")
@stage_options
@preset_options
@settings_but(*UNUSED)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps to measure.")
@click.option(
    "--warmup-steps",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Steps to run before measuring.",
)
@click.option("--out", type=PATH, default=Path("profile"), show_default=True, help="Output directory.")
def profile(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    preset: str | None,
    config: Path | None,
    steps: int,
    warmup_steps: int,
    out: Path,
    **flags: Any,
) -> None:
    """Show where a training step's time goes.

    Takes the settings of `distgpt train`, runs --steps training steps, whatever number --config sets, and
    reports the time of each kind of operation, its speed, and what share of this machine's measured peak that
    is: as a table, as profile.json, and as trace.json for ui.perfetto.dev or chrome://tracing. No weights
    are saved.
    """
    asked = asked_for({**set_by_user(flags), "steps": warmup_steps + steps}, preset, config)
    gpu, asked = deterministic_as_parts(stage, gpu, asked)
    ready = open_stage(stage, threads, without_graphs(stage, gpu))

    from distgpt.core.train.plan import with_dtype
    from distgpt.measure.profile.session import Session, open_steps, prepare
    from distgpt.recipes.derived import configured
    from distgpt.recipes.recipes import followed

    say: Say = partial(print_lines, err=True) if ready.comm.rank == 0 else lambda text: None
    run = configured(ready.comm, with_dtype(followed(asked, ready, say), ready, say))
    if config and ready.comm.rank == 0 and "steps" in parse_toml(config.read_text(), str(config)):
        say(f"{config} sets the steps of training: --steps sets how many are measured, {steps}")
    step, batches = open_steps(run, ready, say)
    prepare(ready.comm, out)
    session = Session(ready, step, run.train, warmup_steps)
    try:
        for done, seconds in enumerate(_steps(session.profiler, batches, warmup_steps + steps), 1):
            warming = " (to warm up)" if done <= warmup_steps else ""
            say(f"step {done} of {warmup_steps + steps}: {1000 * seconds:,.1f} ms{warming}")
        session.finish(out, print_lines)
    except KeyboardInterrupt:
        session.salvage(out, print_lines)
        raise


def _steps(profiler: Any, batches: Any, count: int) -> Iterator[float]:
    """Run steps as training does, the next one launched before the last is read; yield their seconds."""
    running, begun = [], time.perf_counter()
    for number in range(count):
        running.append(profiler.launch(number, batches))
        while len(running) > (profiler.on_gpu and number < count - 1):
            running.pop(0).read()
            ended = time.perf_counter()
            yield ended - begun
            begun = ended

"""distgpt train"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from distgpt.commands.options import settings, stage_options, without_graphs
from distgpt.config import GpuConfig
from distgpt.machine.stages import Stage, opened


@click.command()
@stage_options
@click.option("--preset", help="Start from a named configuration (tiny, gpt-mini, gpt2, …).")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
@settings
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; runs/<preset> if left out.")
@click.option(
    "--resume", metavar="auto|PATH", help="Go on from the newest checkpoint in --out, or from PATH."
)
@click.option("--progress", type=click.Choice(["auto", "live", "plain"]), default="auto", show_default=True)
@click.option("--tensorboard", is_flag=True, help="Write events for TensorBoard into the run directory too.")
@click.option(
    "--profile", is_flag=True, help="Tell at the end where the time went, as `distgpt profile` does."
)
def train(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: str | None,
    progress: str,
    tensorboard: bool,
    profile: bool,
    **flags: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then the flags here.
    """
    ready = opened(stage, threads, without_graphs(stage, gpu) if profile else gpu)

    from distgpt.show.display import listeners
    from distgpt.training.open import configure, open_run
    from distgpt.training.summary import write_summary

    given = {key: value for key, value in flags.items() if value is not None}
    name, run = configure(ready.comm, preset, config, given, out if resume else None)
    shown = listeners(ready.comm, progress, tensorboard)
    session = None
    try:
        trainer = open_run(run, ready, name, out, resume, shown)
        session = _profiled(trainer, ready) if profile else None
        trainer.train()
        write_summary(trainer, ready)
        if session:
            shown.close()
            session.finish(trainer.directory.path, click.echo)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("a run with checkpoints goes on with --resume auto")
        shown.close()
        if session:
            session.salvage(trainer.directory.path, click.echo)
        raise
    finally:
        shown.close()
    if ready.comm.rank == 0:
        _farewell(trainer)


def _profiled(trainer: Any, stage: Stage) -> Any:
    """Measures the run's own steps after the first ones."""
    from distgpt.measure.profile.session import Session

    session = Session(stage, trainer.model, trainer.settled)
    trainer.watch = session.watch
    return session


def _farewell(trainer: Any) -> None:
    from distgpt.training.loop import sample

    weights = trainer.directory.weights
    click.echo(f"\n{sample(trainer.model, trainer.tokenizer, 0, 240).strip()}\n")
    click.echo(f"weights   {weights}")
    if math.isfinite(trainer.best_loss):
        click.echo(f"best      {trainer.directory.best} (validation loss {trainer.best_loss:.4f})")
    click.echo(f"metrics   {trainer.directory.metrics}")
    click.echo(f"next      distgpt infer --weights {weights} --prompt '…' --temperature 0.8")

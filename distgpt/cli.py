"""The command line: parse, build, call. What commands do is written elsewhere, and imported when they run."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from distgpt import __version__
from distgpt.config import (
    ALLREDUCES,
    DTYPES,
    GRAD_SYNCS,
    MLPS,
    NORMS,
    POSITIONS,
    RECOMPUTE,
    SCHEDULES,
    GpuConfig,
)
from distgpt.leaving import launched_rank, leave
from distgpt.stages import STAGES, opened

F = TypeVar("F", bound=Callable[..., Any])

# (flag, type or choices, help): each sets the configuration value of the same name.
_SETTINGS: list[tuple[str, Any, str]] = [
    ("--data", str, "A bundled text (story, corpus, names) or a text file."),
    ("--tokenizer", str, "byte, char, word, or the path of a saved tokenizer."),
    ("--steps", int, "Optimizer steps."),
    ("--batch-size", int, "Sequences per step, over all ranks."),
    ("--seq-len", int, "Tokens per sequence: the context length."),
    ("--grad-accum", int, "Rounds per step, each on a part of the batch."),
    ("--shift-windows/--fixed-windows", bool, "Cut the text elsewhere in every epoch."),
    ("--lr", float, "Highest learning rate."),
    ("--min-lr", float, "Learning rate at the end of the schedule."),
    ("--schedule", SCHEDULES, "How the rate falls after the warm-up."),
    ("--warmup", int, "Steps of linear warm-up."),
    ("--weight-decay", float, "AdamW's decay, on matrices only."),
    ("--clip", float, "Largest gradient norm; 0 turns clipping off."),
    ("--seed", int, "Seed of weights and batches."),
    ("--dtype", DTYPES, "Number format."),
    ("--vocab-size", int, "Size of the vocabulary, at least the tokenizer's."),
    ("--n-layer", int, "Layers."),
    ("--n-head", int, "Attention heads per layer."),
    ("--n-embd", int, "Width."),
    ("--norm", NORMS, "Normalisation."),
    ("--mlp", MLPS, "Activation of the MLP."),
    ("--positions", POSITIONS, "How positions enter."),
    ("--bias/--no-bias", bool, "Biases in linear layers and layer norms."),
    ("--tied/--untied", bool, "Output layer shares the embedding's weights."),
    ("--grad-sync", GRAD_SYNCS, "How gradients are summed over ranks."),
    ("--recompute", RECOMPUTE, "What the backward pass computes again instead of keeping it."),
    ("--save-every", int, "Steps between checkpoints; 0: only at the end."),
    ("--sample-every", int, "Steps between samples; 0: never."),
    ("--log-every", int, "Steps between lines of metrics."),
]


def _settings(command: F) -> F:
    """Add the options above; without a default, so that only what the user gave overrides the preset."""
    for flag, kind, text in reversed(_SETTINGS):
        if kind is bool:
            command = click.option(flag, default=None, help=text)(command)
        else:
            kind = click.Choice(kind) if isinstance(kind, tuple) else kind
            command = click.option(flag, type=kind, default=None, help=text)(command)
    return command


def _stage_options(command: F) -> F:
    stage = click.option("--stage", type=click.Choice(STAGES), default="serial", show_default=True)
    threads = click.option(
        "--threads", type=int, help="Threads per rank; all cores, shared fairly, if left out."
    )
    return stage(threads(_gpu_options(command)))


def _gpu_options(command: F) -> F:
    """How the cuda stages work; they arrive as one argument, `gpu`."""

    @functools.wraps(command)
    def with_gpu(
        *args: Any, cuda_graph: bool, allreduce: str, deterministic: bool, tf32: bool, **others: Any
    ) -> Any:
        gpu = GpuConfig(cuda_graph, allreduce, deterministic, tf32)
        return command(*args, gpu=gpu, **others)

    defaults = GpuConfig()
    options = [
        click.option(
            "--cuda-graph/--no-cuda-graph",
            default=defaults.graphs,
            help="Record each step once and repeat it (cuda stages).",
        ),
        click.option(
            "--allreduce",
            type=click.Choice(ALLREDUCES),
            default=defaults.allreduce,
            show_default=True,
            help="How GPUs sum their gradients (mpi-cuda).",
        ),
        click.option("--deterministic", is_flag=True, help="The same bits in every run (cuda stages)."),
        click.option(
            "--tf32", is_flag=True, help="Products of float32 in a faster format of 10 bits (cuda stages)."
        ),
    ]
    decorated: Any = with_gpu
    for option in options:
        decorated = option(decorated)
    return cast(F, decorated)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="distgpt")
def cli() -> None:
    """Pretrain and run GPT-2-style models, from one core to many nodes.

    \b
      distgpt train                                   train a small model on a bundled text
      mpirun -n 2 distgpt train --stage mpi           the same on two processes
      distgpt infer --prompt "The harbour"            let a model write
    """


@cli.command()
@_stage_options
@click.option("--preset", help="Start from a named configuration (tiny, gpt-mini, gpt2, …).")
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
@_settings
@click.option("--out", type=click.Path(path_type=Path), help="Run directory; runs/<preset> if left out.")
@click.option(
    "--resume", metavar="auto|PATH", help="Go on from the newest checkpoint in --out, or from PATH."
)
@click.option("--progress", type=click.Choice(["auto", "live", "plain"]), default="auto", show_default=True)
def train(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: str | None,
    progress: str,
    **settings: Any,
) -> None:
    """Train a model.

    Settings come from the defaults, then --preset, then --config, then the flags here.
    """
    ready = opened(stage, threads, gpu)

    from distgpt.display import display
    from distgpt.run import configure, open_run

    given = {key: value for key, value in settings.items() if value is not None}
    name, run = configure(ready.comm, preset, config, given)
    shown = display(ready.comm.rank, ready.comm.size, progress)
    try:
        trainer = open_run(run, ready, name, out, resume, shown)
        trainer.train()
    finally:
        shown.close()
    if ready.comm.rank == 0:
        _farewell(trainer)


def _farewell(trainer: Any) -> None:
    from distgpt.train import sample

    weights = trainer.directory.weights
    click.echo(f"\n{sample(trainer.model, trainer.tokenizer, 0, 240).strip()}\n")
    click.echo(f"weights   {weights}")
    click.echo(f"metrics   {trainer.directory.metrics}")
    click.echo(f"next      distgpt infer --weights {weights} --prompt '…' --temperature 0.8")


@cli.command()
@_stage_options
@click.option(
    "--weights", type=click.Path(path_type=Path), help="Weights file; a bundled sample if left out."
)
@click.option("--prompt", help="Text to go on from.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the text to go on from.")
@click.option("--max-new-tokens", type=click.IntRange(0), default=200, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Draw from the k likeliest tokens only.")
@click.option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens that make up p.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of streamed text.")
def infer(
    stage: str,
    threads: int | None,
    gpu: GpuConfig,
    weights: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Let a model write on from a prompt."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    from distgpt.generate import Sampling
    from distgpt.infer import Request, infer

    sampling = Sampling(temperature, top_k, top_p, seed)
    request = Request(weights, prompt, prompt_file, max_new_tokens, sampling, dtype)
    infer(request, opened(stage, threads, gpu), as_json)


@cli.command()
@click.option("--stage", type=click.Choice(STAGES), help="Exit with 2 if this stage cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything about every rank.")
def doctor(stage: str | None, as_json: bool) -> None:
    """Tell what this machine, or this job under mpirun, can run, and what to install for the rest."""
    from distgpt.doctor import consult

    consult(stage, as_json)


def main() -> None:
    """The entry point: every way out passes here, with one exit code for the whole job."""
    try:
        # Where it was closed, Python has None.
        sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
        if isinstance(sys.stdout, TextIOWrapper):  # a terminal that lacks a character is no reason to stop
            sys.stdout.reconfigure(errors="replace")
        # Not cli.main(), which keeps interrupts and closed pipes to itself.
        with cli.make_context("distgpt", sys.argv[1:]) as context:
            cli.invoke(context)
        print(end="", flush=True)
        code = 0
    except click.exceptions.Exit as done:  # --help and --version
        code = done.exit_code
    except click.ClickException as error:
        code = 2
        if launched_rank() == 0:
            error.show()
    except BaseException as error:
        code = leave(error, opened.comm)
    sys.exit(code)

"""Options that several commands share: the settings of a run, and the stage with its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

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
from distgpt.machine.stages import ON_GPU, STAGES

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """Numbers in a range, without inf and nan."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, param, context))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, context)
        return number


# (flag, type or choices, help): each sets the configuration value of the same name.
_SETTINGS: list[tuple[str, Any, str]] = [
    ("--data", str, "A bundled text (story, corpus, names), a text file, or a folder of token shards."),
    ("--tokenizer", str, "byte, char, word, gpt2, or the path of one; auto: the shards' own."),
    ("--verify-data/--trust-data", bool, "Read all shards before the first step, to find damage."),
    ("--init", str, "Weights to begin with: their model is trained further."),
    ("--steps", int, "Optimizer steps."),
    ("--batch-size", int, "Sequences per step, over all ranks."),
    ("--batch-tokens", int, "The same in tokens."),
    ("--seq-len", int, "Tokens per sequence: the context length."),
    ("--grad-accum", int, "Rounds per step, each on a part of the batch; 0: what fits into memory."),
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
    ("--eval-every", int, "Steps between evaluations; 0: only at the end."),
    ("--val-fraction", float, "Part of a text that is held out for them (shards have theirs)."),
    ("--val-tokens", int, "Tokens of it that an evaluation reads; 0: all."),
    ("--hellaswag", str, "The benchmark's file, to be answered at evaluations too."),
    ("--log-every", int, "Steps between lines of metrics."),
]


def settings(command: F) -> F:
    """Add the options above; without a default, so that only what the user gave overrides the preset."""
    return settings_but()(command)


def settings_but(*unused: str) -> Callable[[F], F]:
    """The same without these flags."""
    return lambda command: _with_settings(command, unused)


def _with_settings(command: F, unused: Sequence[str]) -> F:
    for flag, kind, text in reversed(_SETTINGS):
        if flag in unused:
            continue
        if kind is bool:
            command = click.option(flag, default=None, help=text)(command)
        else:
            kind = click.Choice(kind) if isinstance(kind, tuple) else kind
            command = click.option(flag, type=kind, default=None, help=text)(command)
    return command


def stage_options(command: F) -> F:
    stage = click.option("--stage", type=click.Choice(STAGES), default="serial", show_default=True)
    threads = click.option(
        "--threads", type=int, help="Threads per rank; all cores, shared fairly, if left out."
    )
    return stage(threads(_gpu_options(command)))


def launch_options(command: F) -> F:
    """How a command that starts jobs of several ranks does so."""
    ranks = click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Processes.")
    hostfile = click.option("--hostfile", type=click.Path(path_type=Path), help="Hosts to start them on.")
    launcher = click.option("--launcher", help='What starts them: mpirun, or as in "srun --mpi=pmix".')
    return ranks(hostfile(launcher(command)))


def without_graphs(stage: str, gpu: GpuConfig) -> GpuConfig:
    """What is in a recorded graph can't be timed one by one."""
    return replace(gpu, graphs=False) if stage in ON_GPU else gpu


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

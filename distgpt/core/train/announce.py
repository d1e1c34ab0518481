"""The first lines a user sees: facts of the run, and settings with another effect than one may expect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from distgpt.core.base.errors import Say, escape
from distgpt.core.base.formatting import count, size, size_in_column
from distgpt.core.config import PARAMETERS_PER_TOKEN, RunConfig, TrainConfig
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus
from distgpt.core.data.named import resolve_data
from distgpt.core.data.shards import is_shards
from distgpt.core.data.unreadable import MARKUP, advice
from distgpt.core.model.model import Model
from distgpt.core.saved.checkpoint import State
from distgpt.core.train.assessment import METRICS, Validation
from distgpt.core.train.resume import Change
from distgpt.core.train.seams import Times, is_over, kind_of
from distgpt.core.train.whereabouts import shown_hosts

BY_HEART = 40  # times that a text is read, from which on a large model knows it


def facts(
    stage: Stage,
    hosts: Sequence[str],
    config: RunConfig,
    directory: Path,
    model: Model,
    batches: Batches,
    validation: Validation | None,
    first_step: int,
    times: Times,
) -> dict[str, object]:
    """Return what the display shows when the run starts."""
    seconds = 60 * config.train.train_minutes
    return {
        "stage": stage.name,
        "dtype": config.train.dtype,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "hosts": shown_hosts(hosts),
        "parameters": model.layout.elements,
        "vocabulary": config.model.vocab_size,
        "corpus_tokens": batches.tokens,
        "held_out_tokens": validation.count if validation else 0,
        "first_step": first_step,
        "steps": config.train.steps,
        "seconds": seconds,
        "seconds_left": times.begun - times.spent + seconds - time.monotonic() if seconds else None,
        "directory": str(directory),
    }


def note_settings(config: RunConfig, corpus: Corpus, batches: Batches, is_evaluated: bool, say: Say) -> None:
    """Say which settings have another effect than one may expect. For rank 0."""
    t = config.train
    for line in batches.notes(t.steps):
        say(line)
    if corpus.val is not None and corpus.val.fingerprint == batches.fingerprint:
        say(f"{escape(t.val)} is the training text: validation tells nothing about other texts")
    if config.model.window and not any(config.model.windows):
        say(
            "no window is shorter than the context: every layer attends to all of it (--window, --full-every)"
        )
    if t.warmup > t.steps > 0:
        say(f"--warmup {t.warmup} is longer than the run of {count(t.steps, 'step')}: --lr is never reached")
    if t.data.lower().endswith(MARKUP):
        say(f"{escape(t.data)} is learned with its markup: {escape(advice(Path(t.data), '.epub'))}")
    if t.val_fraction and is_shards(resolve_data(t.data)):
        say("--val-fraction has no effect: shards have a part of their own for validation")
    if t.eval_every and not is_evaluated:
        *others, last = ("--val", "--val-fraction", *(f"--{name}" for name in METRICS))
        say(f"nothing is held out, so nothing is evaluated: see {', '.join(others)} and {last}")


def note_changes(changes: dict[str, Change], step: int, say: Say) -> None:
    """Say which settings of a resumed run are others from this step on. For rank 0."""
    if changes:
        listed = ", ".join(f"{name} {escape(f'{old} → {new}')}" for name, (old, new) in changes.items())
        say(f"changed from step {step} on: {listed}")


def note_resumed(t: TrainConfig, state: State, batches: Batches, say: Say) -> None:
    """Say that a run from a checkpoint has nothing left to do, or another text. For rank 0."""
    if is_over(state.seconds, t) if t.train_minutes else state.step == t.steps:
        say(f"nothing is left to train: {'--within' if t.train_minutes else '--steps'} asks for more")
    if state.corpus != batches.fingerprint:
        say(f"{escape(t.data)} is another text than so far, and is read from here on")


def note_new(t: TrainConfig, model: Model, batches: Batches, token_bytes: float | None, say: Say) -> None:
    """Say what a new run begins with, and that it will learn its text by heart if it will. For rank 0."""
    if t.init:
        use = kind_of(t).use_of_init(t)
        say(f"{escape(t.init)} {use}, with a peak learning rate of {t.lr:g} (--lr)")
    parameters = model.layout.elements
    steps = 0 if t.train_minutes else t.steps  # nobody knows those of a run by the clock
    times = steps * t.batch_size * batches.seq_len / batches.tokens
    enough = parameters / PARAMETERS_PER_TOKEN
    if t.init or not token_bytes or times < BY_HEART or batches.tokens >= enough:
        return
    text, wanted = size(batches.tokens * token_bytes), size_in_column(enough * token_bytes)
    say(
        f"the text is short: {text}, read {round(times):,} times. A model of {parameters:,} parameters learns"
        f" that by heart, and little else: give it {wanted} or more, or make it smaller (--depth)"
    )

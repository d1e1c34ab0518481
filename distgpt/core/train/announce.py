"""The first lines a user sees: facts of the run, and settings with another effect than one may expect."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import Say, escape
from distgpt.core.base.files import without_locks
from distgpt.core.base.formatting import count, size, size_in_column
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.asked import Asked
from distgpt.core.config.presets import DEFAULT_PRESET
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus
from distgpt.core.data.named import resolve_data
from distgpt.core.data.shards import is_shards
from distgpt.core.data.unreadable import MARKUP, advice
from distgpt.core.model.model import Model
from distgpt.core.train.assessment import Validation
from distgpt.core.train.plan import Plan
from distgpt.core.train.progress import Progress
from distgpt.core.train.resumption import described
from distgpt.core.train.seams import is_over
from distgpt.core.train.whereabouts import shown_hosts
from distgpt.recipes.scaling import PARAMETERS_PER_TOKEN

CHOOSES_MODEL = {"init", "chats", "n_layer", "n_embd"}
BY_HEART = 40  # times that a text is read, from which on a large model knows it


def facts(
    plan: Plan,
    stage: Stage,
    where: dict[str, Any],
    config: RunConfig,
    model: Model,
    batches: Batches,
    validation: Validation | None,
    progress: Progress,
) -> dict[str, Any]:
    """Return what the display shows when the run starts."""
    return {
        "stage": stage.name,
        "dtype": config.train.dtype,
        "ranks": stage.comm.size,
        "threads": stage.threads,
        "hosts": shown_hosts(where["hosts"]),
        "parameters": model.layout.elements,
        "vocabulary": config.model.vocab_size,
        "corpus_tokens": batches.tokens,
        "held_out_tokens": validation.count if validation else 0,
        "first_step": progress.step,
        "steps": config.train.steps,
        "seconds": 60 * config.train.train_minutes,
        "seconds_left": _seconds_left(plan, stage),
        "directory": str(plan.directory.path),
    }


def _seconds_left(plan: Plan, stage: Stage) -> float | None:
    """Return the seconds until the end of a run that ends by the clock."""
    total = 60 * plan.run.train.train_minutes
    return stage.begun + plan.uncounted + total - plan.state.seconds - time.monotonic() if total else None


def note_small_model(stage: Stage, asked: Asked, say: Say) -> None:
    """Suggest a larger model than the default one for a GPU. For all ranks."""
    by_recipe = asked.depth or asked.within or asked.decay_from
    is_chosen = by_recipe or asked.preset or asked.toml or asked.resume or asked.given.keys() & CHOOSES_MODEL
    if stage.device is None or stage.comm.rank or is_chosen:
        return
    # The bundled text is read too fast: five minutes of it would be learned by heart.
    own = "" if "data" in asked.given else "with a text of your own (--data) "
    say(f"{DEFAULT_PRESET} is small for a GPU: {own}--within 5m chooses what learns most in 5 minutes")


def note_surprises(
    plan: Plan, config: RunConfig, corpus: Corpus, batches: Batches, is_evaluated: bool, say: Say
) -> None:
    """Say which settings have another effect than one may expect. For rank 0."""
    t = config.train
    if plan.directory.lacks_locks():
        say(without_locks(plan.directory.path))
    if plan.changes:
        say(f"changed from step {plan.step} on: {described(plan.changes)}")
    if plan.resumed and (is_over(plan.state.seconds, t) if t.train_minutes else plan.step == t.steps):
        say(f"nothing is left to train: {'--within' if t.train_minutes else '--steps'} asks for more")
    if t.init and not plan.resumed:
        how = f"gets adapters of rank {t.lora_rank}" if t.lora_rank else "is trained further"
        say(f"{escape(t.init)} {how}, with a peak learning rate of {t.lr:g} (--lr)")
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
    if plan.resumed and not plan.is_of_same_text(batches.fingerprint):
        say(f"{escape(t.data)} is another text than so far, and is read from here on")
    if t.data.lower().endswith(MARKUP):
        say(f"{escape(t.data)} is learned with its markup: {escape(advice(Path(t.data), '.epub'))}")
    if t.val_fraction and is_shards(resolve_data(t.data)):
        say("--val-fraction has no effect: shards have a part of their own for validation")
    if t.eval_every and not is_evaluated:
        say("nothing is held out, so nothing is evaluated: see --val, --val-fraction and --hellaswag")


def note_short_text(
    plan: Plan, t: TrainConfig, model: Model, batches: Batches, token_bytes: float | None, say: Say
) -> None:
    """Say that a new run will learn its text by heart, and how long a text would make sense. For rank 0."""
    parameters = model.layout.elements
    steps = 0 if t.train_minutes else t.steps  # nobody knows those of a run by the clock
    times = steps * t.batch_size * batches.seq_len / batches.tokens
    enough = parameters / PARAMETERS_PER_TOKEN
    if plan.checkpoint or t.init or not token_bytes or times < BY_HEART or batches.tokens >= enough:
        return
    text, wanted = size(batches.tokens * token_bytes), size_in_column(enough * token_bytes)
    say(
        f"the text is short: {text}, read {round(times):,} times. A model of {parameters:,} parameters learns"
        f" that by heart, and little else: give it {wanted} or more, or make it smaller (--depth)"
    )

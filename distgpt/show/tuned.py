"""A tuning run before it starts: its examples as the model reads them, and how long it would take."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import click

from distgpt.core.base.errors import Say, escape, escape_model_text
from distgpt.core.base.formatting import count, duration, long_duration
from distgpt.core.comm.job import shown_on_terminal
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import AUTO, Tokenizer
from distgpt.core.train.plan import Plan
from distgpt.core.train.setup import make_steps, read_texts
from distgpt.corpora.chats.examples import read_examples
from distgpt.corpora.chats.format import ChatFormat, Example

SHOWN, LONGEST = 3, 2000  # examples, and characters of each
NAMED = 5  # truncated examples that are named
STEPS, SECONDS = 3, 20.0  # timed steps, fewer if they take longer


def dry_run(plan: Plan, stage: Stage, say: Say) -> None:
    """Print examples and time some steps on a copy of the model in memory. Writes nothing. Collective."""
    texts = read_texts(stage.comm, plan.config, AUTO, plan.origin, plan.directory.path.parent, say)
    t, tokenizer = texts.config.train, texts.corpus.tokenizer
    if stage.comm.rank == 0:
        examples = list(read_examples(Path(t.data), ChatFormat(tokenizer)))
        _print_examples(examples, tokenizer, texts.config.model.seq_len)
    for line in texts.batches.notes(t.steps):
        say(line)
    step, taken = make_steps(texts.config, stage, say), list[float]()
    while len(taken) <= STEPS and sum(taken[1:]) < SECONDS:
        begun = time.perf_counter()
        step.launch(len(taken), texts.batches).wait()
        taken.append(time.perf_counter() - begun)
    each = min(taken[1:])  # the first one also allocates
    if stage.comm.rank == 0:
        whole = f"{count(t.steps, 'step')} take {long_duration(t.steps * each)}"
        click.echo(f"time      {whole} at {duration(each)} per step, excluding evaluations")
        click.echo("dry run   nothing was written; to train, omit --dry-run")


def _print_examples(examples: list[Example], tokenizer: Tokenizer, seq_len: int) -> None:
    is_terminal = shown_on_terminal(sys.stdout)
    click.echo(f"examples  trained on: the text {'in green' if is_terminal else 'between « and »'}\n")
    for i in sorted({round(k * (len(examples) - 1) / (SHOWN - 1)) for k in range(SHOWN)}):
        click.echo(f"{_described(examples[i])}\n{_rendered(examples[i], tokenizer, is_terminal)}\n")
    click.echo(f"longest   {_described(max(examples, key=lambda each: len(each.ids)))}")
    cut = [each for each in examples if len(each.ids) > seq_len + 1 and not each.is_text]
    more = f", … ({len(cut) - NAMED:,} more)" if len(cut) > NAMED else ""
    named = "; ".join(map(_described, cut[:NAMED])) + more or "none"
    click.echo(f"cut       after {seq_len + 1:,} tokens (--seq-len): {named}")


def _described(example: Example) -> str:
    learned = int(example.learned[1:].sum())
    return f"{escape(example.where)}: {count(len(example.ids), 'token')}, {learned:,} of them trained on"


def _rendered(example: Example, tokenizer: Tokenizer, is_terminal: bool) -> str:
    """Return the text of an example with its trained parts marked."""
    ids, learned, shown = example.ids[:LONGEST], example.learned[:LONGEST], ""
    starts = [0, *(i for i in range(1, len(ids)) if learned[i] != learned[i - 1]), len(ids)]
    for first, last in pairwise(starts):
        text = tokenizer.decode(ids[first:last])
        text = escape_model_text(text) if is_terminal else text
        if learned[first]:
            text = click.style(text, fg="green", bold=True) if is_terminal else f"«{text}»"
        shown += text
    return shown + "…" * (len(example.ids) > LONGEST)

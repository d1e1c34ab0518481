"""A tuning run before it starts and after it ends: examples, expected time, and answers of both models."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import numpy as np

from distgpt.core.base.errors import DistgptError, Say, UsageError, escape, escape_model_text
from distgpt.core.base.files import atomic_file
from distgpt.core.base.formatting import count, duration, long_duration, size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.job import shown_on_terminal
from distgpt.core.comm.resources import granted_memory
from distgpt.core.components import components
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import AUTO, Ids, Tokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.core.model.model import Architecture
from distgpt.core.ops.api import IGNORE_INDEX, Array
from distgpt.core.saved.modelfile import load_model, read_description
from distgpt.core.train.plan import Plan
from distgpt.core.train.run import Run
from distgpt.core.train.setup import make_steps, read_texts
from distgpt.corpora.chats.examples import ExampleBatches, read_examples
from distgpt.corpora.chats.format import ChatFormat, Example

SHOWN, LONGEST = 3, 2000  # examples or questions, and tokens of an example
NAMED = 5  # truncated examples that are named
ANSWERS = "answers.md"  # in a run's directory
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
    while on_root(stage.comm, lambda: len(taken) <= STEPS and sum(taken[1:]) < SECONDS):
        begun = time.perf_counter()
        step.launch(len(taken), texts.batches).wait()
        taken.append(time.perf_counter() - begun)
    each = min(taken[1:])  # the first one also allocates
    if stage.comm.rank == 0:
        steps = f"{count(t.steps, 'step')} of {duration(each)}"
        click.echo(f"time      {long_duration(t.steps * each)} for {steps}, excluding evaluations")
        click.echo("dry run   nothing was written; to train, omit --dry-run")


def _print_examples(examples: list[Example], tokenizer: Tokenizer, seq_len: int) -> None:
    is_terminal = shown_on_terminal(sys.stdout)
    click.echo(f"examples  trained on: the text {'in green' if is_terminal else 'between « and »'}\n")
    for i in _spread(len(examples)):
        click.echo(f"{_described(examples[i])}\n{_rendered(examples[i], tokenizer, is_terminal)}\n")
    click.echo(f"longest   {_described(max(examples, key=lambda each: len(each.ids)))}")
    cut = [each for each in examples if len(each.ids) > seq_len + 1 and not each.is_text]
    more = f", … ({len(cut) - NAMED:,} more)" if len(cut) > NAMED else ""
    named = "; ".join(map(_described, cut[:NAMED])) + more or "none"
    click.echo(f"cut       after {seq_len + 1:,} tokens (--seq-len): {named}")


def _spread(length: int) -> list[int]:
    """Return the indices of the first, a middle and the last element, or of all if there are fewer."""
    return sorted({k * (length - 1) // (SHOWN - 1) for k in range(SHOWN)}) if length else []


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


LENGTH = 80  # tokens of an answer


def compare(run: Run) -> None:
    """Print the answers of the model before and after tuning to a few questions, and write them to a file.

    The questions are from the validation data, or from the training data if there are none. For rank 0.
    """
    questions = _questions(run)
    if not questions:
        return
    directory, best = run.directory, run.checkpoints.best
    run.step.release()  # the other models need memory
    try:
        answers = [
            _answers(run, path, [prompt for prompt, _ in questions])
            for path in (Path(run.config.train.init), directory.best if best else directory.weights)
        ]
    except (DistgptError, OSError, MemoryError) as error:  # such as a base that has moved
        click.echo(f"answers   not compared: {error or 'too little memory'}")
        return
    is_held_out = run.assessment is not None and run.assessment.validation is not None
    source = "held-out" if is_held_out else "training"
    path = directory.path / ANSWERS
    click.echo(f"answers   to {source} questions, without randomness; also in {escape(str(path))}\n")
    page = [
        f"# Answers to {source} questions",
        "",
        "| question | before | after | in the data |",
        "|---|---|---|---|",
    ]
    decode, chat = run.tokenizer.decode, ChatFormat(run.tokenizer)
    for (prompt, wanted), *found in zip(questions, *answers, strict=True):
        answer = decode(wanted[~np.isin(wanted, chat.ends)])
        for stop in chat.stops:
            answer = answer.removesuffix(stop)
        texts = [decode(prompt), *found, answer]
        page.append("| " + " | ".join(map(_cell, texts)) + " |")
        for label, text in zip(("question", "before", "after", "data"), texts, strict=True):
            shown = text.strip() if label != "question" else text.strip()[-LONGEST:]
            click.echo(f"  {label:<10}" + escape_model_text(shown).replace("\n", f"\n{'':12}"))
        click.echo()
    try:
        with atomic_file(path) as file:
            file.write("\n".join([*page, ""]).encode())
    except OSError as error:
        click.echo(f"note      {escape(str(path))} was not written: {error}")


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("\n", "<br>")


def _questions(run: Run) -> list[tuple[Ids, Ids]]:
    """Return the tokens before an answer, and the answer's, from the first, a middle and the last example."""
    found: list[tuple[Array, Array]] = []
    if run.assessment is not None and run.assessment.validation is not None:
        for span in run.assessment.validation.spans:
            assert span.loss_mask is not None
            found.append((span.ids, span.loss_mask))
    elif isinstance(run.batches, ExampleBatches):
        examples = run.batches.examples
        for first, last in pairwise(examples.starts.tolist()):
            targets = examples.targets[first:last]
            ids = np.append(examples.read(first, last), targets[-1:].clip(0))
            found.append((ids, targets != IGNORE_INDEX))
    result = []
    for ids, learned in found:
        at = int(np.argmax(learned))
        if at > 0 and len(ids) > 1:  # not a plain text
            end = at + int(np.argmin(np.append(learned[at:], False)))
            result.append((ids[: at + 1], ids[at + 1 : end + 1]))
    return [result[i] for i in _spread(len(result))]


def _answers(run: Run, path: Path, prompts: list[Ids]) -> list[str]:
    """Return a model's answers. The model is in memory only during this call."""
    comm, merge, chat = SerialComm(), None, ChatFormat(run.tokenizer)
    if kind := read_description(path).part:
        path, merge = components().part(kind).whole(path, comm)
    t, config = run.settings, run.model.config
    context = None if config.has_position_vectors else config.seq_len  # the base's may be much longer
    alone = replace(run.stage, comm=comm)  # the other ranks take no part
    dtype = t.dtype
    if t.is_base_small:
        dtype = "int8"  # int4 would round small changes away
        need, free = Architecture(config).layout.size, granted_memory().free
        if 2 * need > free:  # packed, and while they are read
            raise UsageError(f"{size(2 * need)} are required, and {size(free)} are free")
    model, _ = load_model(path, alone.kernels(dtype, t.matmul_backend), comm, context, merge)
    usual = Request(max_new_tokens=LENGTH, ends=chat.ends, stop=chat.stops, overflow="stop")
    requests = [replace(usual, prompt=prompt.tolist()) for prompt in prompts]
    done = complete(Engine(slots_for(model, len(requests)), run.tokenizer), requests)
    return [samples[0].text for samples in done]

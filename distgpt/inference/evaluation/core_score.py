"""The CORE score of DCLM (arXiv 2406.11794): the mean of 22 tasks' accuracies, each relative to guessing.

The directory has the authors' files: core.yaml lists the tasks, eval_meta_data.csv the accuracy of guessing
in percent, and eval_data/ the questions. Questions, their order, examples and scores are those of nanochat.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.base.checked import checked, parse_json
from distgpt.core.base.errors import DataError, UsageError, first_line
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.data.textfile import read_text
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.train.assessment import Progress, Scorer, Span, with_progress
from distgpt.inference.evaluation.benchmark import cut_to_fit, likelihoods

ORDER_SEED, SHOTS_SEED = 1337, 1234  # of the order of a task's questions, and of the first one's examples
GREEDY = "language_modeling"  # type of the tasks in which greedy decoding must produce the answer
Example = dict[str, Any]


class Task(NamedTuple):
    label: str
    kind: str
    path: Path
    shots: int  # solved examples before a question
    delimiter: str  # between a question and its answer
    guessing: float  # accuracy of guessing, from 0 to 1


class Asked(NamedTuple):
    """A task's questions: the texts of each, which differ in answer or context, and the right one."""

    task: Task
    texts: list[list[str]]
    right: list[int]


def read_tasks(directory: Path) -> list[Asked]:
    """Return the tasks with their questions. A DataError names the file, the line and the problem."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError("--core reads core.yaml; install PyYAML (pip install pyyaml)") from None
    listed, guesses = directory / "core.yaml", directory / "eval_meta_data.csv"
    try:
        tasks = yaml.safe_load(read_text(listed))["icl_tasks"]
        rows = csv.DictReader(read_text(guesses).splitlines())
        guessing = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
        found = [
            Task(
                label=checked(str, each["label"], ("label",)),
                kind=checked(str, each["icl_task_type"], ("icl_task_type",)),
                path=directory / "eval_data" / checked(str, each["dataset_uri"], ("dataset_uri",)),
                shots=checked(int, each["num_fewshot"][0], ("num_fewshot",)),
                delimiter=checked(str, each.get("continuation_delimiter", " "), ("continuation_delimiter",)),
                guessing=guessing[each["label"]],
            )
            for each in tasks
        ]
    except (yaml.YAMLError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{listed} and {guesses.name} do not list tasks: {first_line(error)}") from None
    if not found:
        raise DataError(f"{listed} lists no tasks")
    return list(map(_asked, found))


def _asked(task: Task) -> Asked:
    if task.kind not in TEXTS:
        raise DataError(f"{task.label}: unknown icl_task_type {task.kind!r:.40}; known: {', '.join(TEXTS)}")
    examples = [_parsed(line, task, number) for number, line in enumerate(_lines(task.path), 1)]
    random.Random(ORDER_SEED).shuffle(examples)
    if len(examples) <= task.shots:
        raise DataError(f"{task.path} has {len(examples)} questions; {task.shots} examples need more")
    texts = []
    for i, example in enumerate(examples):
        others = [j for j in range(len(examples)) if j != i]
        chosen = random.Random(SHOTS_SEED + i).sample(others, task.shots)
        before = "".join(f"{_solved(examples[j], task)}\n\n" for j in chosen)
        texts.append([before + text for text in TEXTS[task.kind](example, task.delimiter)])
    return Asked(task, texts, [example.get("gold", 0) for example in examples])


def _lines(path: Path) -> list[str]:
    return [line for line in read_text(path).split("\n") if line.strip()]


def _parsed(line: str, task: Task, number: int) -> Example:
    """Return a question whose fields are checked by rendering it."""
    try:
        example = checked(dict[str, Any], parse_json(line), ())
        texts = TEXTS[task.kind](example, task.delimiter)
        right = example.get("gold", 0) if task.kind == GREEDY else example["gold"]
        if type(right) is not int or not 0 <= right < len(texts):
            raise ValueError(f"gold must be an index below {len(texts)}, not {right!r:.40}")
        _solved(example, task)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{task.path}, line {number}: {first_line(error)}") from None
    return example


def _of_choices(example: Example, delimiter: str) -> list[str]:
    return [example["query"] + delimiter + choice for choice in example["choices"]]


def _of_contexts(example: Example, delimiter: str) -> list[str]:
    return [context + delimiter + example["continuation"] for context in example["context_options"]]


def _of_text(example: Example, delimiter: str) -> list[str]:
    """Return the text without and with its continuation."""
    context = example["context"].strip() + delimiter
    return [context.strip(), context + example["continuation"]]


TEXTS: dict[str, Callable[[Example, str], list[str]]] = {
    "multiple_choice": _of_choices,
    "schema": _of_contexts,
    GREEDY: _of_text,
}


def _solved(example: Example, task: Task) -> str:
    return TEXTS[task.kind](example, task.delimiter)[1 if task.kind == GREEDY else example["gold"]]


def _spans(asked: Asked, place: int, tokenizer: Tokenizer, seq_len: int) -> list[Span]:
    """Return a span for each text of a question: the tokens after those that all begin (or end) with."""
    tokens = [tokenizer.encode_prompt(text) for text in asked.texts[place]]
    shortest = min(map(len, tokens))
    if asked.task.kind == GREEDY:
        starts = [len(tokens[0])]
        if tokens.pop(0) != tokens[0][: starts[0]]:
            raise DataError("the context's tokens change with the continuation")
    elif asked.task.kind == "schema":
        common = _common([each[::-1] for each in tokens])
        starts = [len(each) - common for each in tokens]
    else:
        starts = [min(_common(tokens), shortest - 1)] * len(tokens)
    return [cut_to_fit(np.array(each), start, seq_len) for each, start in zip(tokens, starts, strict=True)]


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of first tokens that all sequences share."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False)))


class Core:
    """The tokenized questions of all tasks."""

    def __init__(self, comm: Comm, directory: Path, tokenizer: Tokenizer, seq_len: int) -> None:
        """Read the files on rank 0 and tokenize them on every rank. Collective."""
        self.asked = on_root(comm, lambda: read_tasks(directory))
        self.spans: list[list[list[Span]]] = []
        for asked in self.asked:
            try:
                self.spans.append([_spans(asked, i, tokenizer, seq_len) for i in range(len(asked.texts))])
            except DataError as error:
                raise collective_error(DataError(f"{asked.task.path}: {error}")) from None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> dict[str, Any]:
        """Return the score, and each task's accuracy. Collective."""
        spans = [span for task in self.spans for question in task for span in question]
        result = with_progress(partial(likelihoods, scorer), spans, scorer.comm, progress)
        found, end = {}, 0
        for asked, questions in zip(self.asked, self.spans, strict=True):
            hits = []
            for right, question in zip(asked.right, questions, strict=True):
                losses, greedy = result[end : end + len(question)].T
                end += len(question)
                lengths = [span.count for span in question]
                is_greedy = asked.task.kind == GREEDY
                hits.append(greedy[0] == 1 if is_greedy else (losses / lengths).argmin() == right)
            found[asked.task.label] = float(np.mean(hits))
        centered = [(found[task.label] - task.guessing) / (1 - task.guessing) for task, *_ in self.asked]
        return {"core": float(np.mean(centered)), "core_tasks": found, "loss": float(result[:, 0].sum())}

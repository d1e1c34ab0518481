"""Benchmarks as their authors publish them: a file, or a folder, becomes questions in lm-eval's words."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, escape
from distgpt.core.data.textfile import read_text

SHOTS = 5  # examples before a question of MMLU
LETTERS = ("A", "B", "C", "D")  # its answers
LABELS = "-labels.lst"  # ends the name of a file of right answers, which begins as that of the questions


class Question(NamedTuple):
    """Beginnings, what may follow each, and which is right. Where a word is to be guessed there is one."""

    choices: list[tuple[str, str]]
    right: int
    topic: str = ""


def _hellaswag(example: dict[str, Any], label: str | None) -> Question:
    """hellaswag_val.jsonl: {"activity_label", "ctx_a", "ctx_b", "endings", "label"}, or with "ctx" alone."""
    endings = example.get("endings")
    if not isinstance(endings, list) or len(endings) < 2:
        raise DataError("there is no list of endings")
    if "activity_label" in example:
        first, second = _text(example, "ctx_a"), str(example.get("ctx_b", "")).capitalize()
        context = f"{_text(example, 'activity_label')}: {first} {second}"
    else:
        context = _text(example, "ctx")
    texts = [_text({"ending": ending}, "ending") for ending in endings]
    right = _index(example.get("label"), range(len(endings)))
    return _question(_cleaned(context), list(map(_cleaned, texts)), right)


def _arc(example: dict[str, Any], label: str | None) -> Question:
    """ARC-Easy-Test.jsonl: {"question": {"stem", "choices": [{"text", "label"}, …]}, "answerKey"}."""
    asked = example.get("question")
    asked = asked if isinstance(asked, dict) else {}
    choices = asked.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise DataError("there is no question with choices")
    right = _index(example.get("answerKey"), [choice.get("label") for choice in choices])
    stem, texts = _text(asked, "stem"), [_text(choice, "text") for choice in choices]
    return _question(f"Question: {stem}\nAnswer:", texts, right)


def _piqa(example: dict[str, Any], label: str | None) -> Question:
    """valid.jsonl: {"goal", "sol1", "sol2"}, beside valid-labels.lst with 0 or 1 on each line."""
    goal, *texts = (_text(example, key) for key in ("goal", "sol1", "sol2"))
    return _question(f"Question: {goal}\nAnswer:", texts, _index(label, range(2)))


def _winogrande(example: dict[str, Any], label: str | None) -> Question:
    """dev.jsonl: {"sentence" with a _, "option1", "option2", "answer"}; or answers in dev-labels.lst.

    The rest of the sentence is scored behind each option.
    """
    sentence, *options = (_text(example, key) for key in ("sentence", "option1", "option2"))
    begun, _, rest = sentence.partition("_")
    if not rest.strip():
        raise DataError("the sentence must have a _ with some text behind it")
    right = _index(example.get("answer", label), range(1, 3))
    return Question([(begun + option, " " + rest.strip()) for option in options], right)


def _lambada(example: dict[str, Any], label: str | None) -> Question:
    """lambada_test_plain_text.txt: a text on each line; or JSON lines with "text". The last word counts."""
    begun, _, word = _text(example, "text").rpartition(" ")
    if not begun.strip() or not word.strip():
        raise DataError("a text must have two words, a space between them")
    return _question(begun, [word], 0)


LINES: dict[str, Callable[[dict[str, Any], str | None], Question]] = {
    "hellaswag": _hellaswag,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "lambada": _lambada,
}


def read_questions(name: str, path: Path) -> list[Question]:
    """Return the questions of a benchmark. A DataError names the file, the line and what is wrong."""
    found = list(_mmlu(path) if name == "mmlu" else _in_lines(path, LINES[name], name == "lambada"))
    if not found:
        raise DataError(f"{path} holds no questions")
    return found


def _in_lines(
    path: Path, question: Callable[[dict[str, Any], str | None], Question], plain: bool
) -> Iterator[Question]:
    """Yield the question of each line, a JSON object; with `plain` a line that is none is a text."""
    beside = path.with_name(path.stem + LABELS)
    labels = iter(read_text(beside).split() if beside.is_file() else [])
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            is_text = plain and not line.startswith("{")
            example = {"text": line} if is_text else parse_json(line)
            if not isinstance(example, dict):
                raise DataError("this is no JSON object")
            yield question(example, next(labels, None))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: this is no JSON object: {error}") from None
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if next(labels, None) is not None:
        raise DataError(f"{beside} has more answers than {path} has questions")


def _mmlu(path: Path) -> Iterator[Question]:
    """A folder with dev/SUBJECT_dev.csv, for examples, and test/SUBJECT_test.csv."""
    tests = sorted((path / "test").glob("*_test.csv"))
    if not tests:
        raise DataError(f"{path} has no files test/SUBJECT_test.csv")
    for test in tests:
        subject = test.name.removesuffix("_test.csv")
        about = subject.replace("_", " ")
        shown = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        for asked, letter in _rows(path / "dev" / f"{subject}_dev.csv")[:SHOTS]:
            shown += f"{asked} {letter}\n\n"
        for asked, letter in _rows(test):
            yield _question(shown + asked, LETTERS, LETTERS.index(letter), subject)


def _rows(path: Path) -> list[tuple[str, str]]:
    """Return each question with its choices, and the letter of the right one."""
    found = []
    reader = csv.reader(read_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in reader:
            if len(row) != 2 + len(LETTERS) or row[-1] not in LETTERS:
                raise DataError("a row must be a question, four choices, and A, B, C or D")
            lines = [
                row[0].strip(),
                *(f"{letter}. {text}" for letter, text in zip(LETTERS, row[1:], strict=False)),
            ]
            found.append(("\n".join([*lines, "Answer:"]), row[-1]))
    except (csv.Error, DataError) as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
    return found


def _question(context: str, texts: Sequence[str], right: int, topic: str = "") -> Question:
    return Question([(context, " " + text) for text in texts], right, topic)


def _text(example: dict[str, Any], key: str) -> str:
    text = example.get(key)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{key} must be a text, and not empty")
    return text


def _index(answer: Any, known: Sequence[Any]) -> int:
    """Return the place of the right answer, which may be a number or its text."""
    names = list(map(str, known))
    if answer is None:
        raise DataError(f"there is no answer, neither here nor in a file ...{LABELS} beside it")
    if isinstance(answer, (bool, float)) or str(answer) not in names:
        raise DataError(f"the answer is {escape(repr(answer)):.40}: it must be one of {', '.join(names)}")
    return names.index(str(answer))


def _cleaned(text: str) -> str:
    """Take out what HellaSwag's texts keep of WikiHow's pages."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")

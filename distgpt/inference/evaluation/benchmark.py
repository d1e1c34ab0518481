"""Published benchmarks: files become questions with lm-eval's prompts, then spans of tokens.

Each choice is scored by the loss of its tokens and by whether greedy decoding would produce it.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, escape
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.data.textfile import read_text
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.ops.api import Array
from distgpt.core.train.assessment import Progress, Scorer, Span, with_progress

SHOTS = 5  # examples before a question of MMLU
LETTERS = ("A", "B", "C", "D")  # labels of MMLU's choices
LABELS = "-labels.lst"  # suffix of the file of answers, after the stem of the file of questions
NORMALISED = ("hellaswag", "arc_easy", "arc_challenge", "piqa")  # choices differ in length
SHOWN = ("acc", "acc_norm")
AT_ONCE = 128  # predictions per batch of logits
KEYS = ("acc", "examples")  # keys of every benchmark
OTHER_KEYS = dict.fromkeys(NORMALISED, "acc_norm") | {"lambada": "perplexity", "mmlu": "subjects"}


class Question(NamedTuple):
    """(context, continuation) pairs, the index of the right one, and a topic. Cloze questions have one."""

    choices: list[tuple[str, str]]
    right: int
    topic: str = ""


def _hellaswag(example: dict[str, Any]) -> Question:
    """hellaswag_val.jsonl: {"activity_label", "ctx_a", "ctx_b" or "ctx" instead, "endings", "label"}."""
    endings = example.get("endings")
    if not isinstance(endings, list) or len(endings) < 2:
        raise DataError("no list of endings")
    if "activity_label" in example:
        first, second = _text(example, "ctx_a"), str(example.get("ctx_b", "")).capitalize()
        context = f"{_text(example, 'activity_label')}: {first} {second}"
    else:
        context = _text(example, "ctx")
    texts = [_text({"ending": ending}, "ending") for ending in endings]
    right = _index(example.get("label"), range(len(endings)))
    return _question(_cleaned(context), list(map(_cleaned, texts)), right)


def _arc(example: dict[str, Any]) -> Question:
    """ARC-Easy-Test.jsonl: {"question": {"stem", "choices": [{"text", "label"}, …]}, "answerKey"}."""
    asked = example.get("question")
    asked = asked if isinstance(asked, dict) else {}
    choices = asked.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise DataError("no question with choices")
    right = _index(example.get("answerKey"), [choice.get("label") for choice in choices])
    stem, texts = _text(asked, "stem"), [_text(choice, "text") for choice in choices]
    return _question(f"Question: {stem}\nAnswer:", texts, right)


def _piqa(example: dict[str, Any]) -> Question:
    """valid.jsonl: {"goal", "sol1", "sol2"}; valid-labels.lst has 0 or 1 on each line."""
    goal, *texts = (_text(example, key) for key in ("goal", "sol1", "sol2"))
    return _question(f"Question: {goal}\nAnswer:", texts, _index(example.get("answer"), range(2)))


def _winogrande(example: dict[str, Any]) -> Question:
    """dev.jsonl: {"sentence" with a _, "option1", "option2", "answer"}; answers may be in dev-labels.lst.

    The rest of the sentence is scored after each option.
    """
    sentence, *options = (_text(example, key) for key in ("sentence", "option1", "option2"))
    begun, _, rest = sentence.partition("_")
    if not rest.strip():
        raise DataError("the sentence must have a _ followed by text")
    right = _index(example.get("answer"), range(1, 3))
    return Question([(begun + option, " " + rest.strip()) for option in options], right)


def _lambada(example: dict[str, Any]) -> Question:
    """lambada_test_plain_text.txt, or JSON lines with "text". The last word of each line is scored."""
    begun, _, word = _text(example, "text").rpartition(" ")
    if not begun.strip() or not word.strip():
        raise DataError("the text must have two words separated by a space")
    return _question(begun, [word], 0)


LINES: dict[str, Callable[[dict[str, Any]], Question]] = {
    "hellaswag": _hellaswag,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "lambada": _lambada,
}


def read_questions(name: str, path: Path) -> list[Question]:
    """Return the questions of a benchmark. A DataError names the file, the line and the problem."""
    result = list(_mmlu(path) if name == "mmlu" else _in_lines(path, LINES[name], name == "lambada"))
    if not result:
        raise DataError(f"{path} has no questions")
    return result


def _in_lines(path: Path, question: Callable[[dict[str, Any]], Question], plain: bool) -> Iterator[Question]:
    """Yield the question of each line, a JSON object. With `plain`, other lines are plain text."""
    beside = path.with_name(path.stem + LABELS)
    labels = iter(read_text(beside).split() if beside.is_file() else [])
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            is_text = plain and not line.startswith("{")
            example = {"text": line} if is_text else parse_json(line)
            if not isinstance(example, dict):
                raise DataError("not a JSON object")
            yield question({"answer": next(labels, None), **example})
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not a JSON object: {error}") from None
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    if next(labels, None) is not None:
        raise DataError(f"{beside} has more answers than {path} has questions")


def _mmlu(path: Path) -> Iterator[Question]:
    """Parse a directory with dev/SUBJECT_dev.csv (examples) and test/SUBJECT_test.csv."""
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
    """Return the text of each question with its choices, and the letter of the right one."""
    result = []
    reader = csv.reader(read_text(path).splitlines(keepends=True), strict=True)
    try:
        for row in reader:
            if len(row) != 2 + len(LETTERS) or row[-1] not in LETTERS:
                raise DataError("a row must be a question, four choices, and A, B, C or D")
            lines = [
                row[0].strip(),
                *(f"{letter}. {text}" for letter, text in zip(LETTERS, row[1:], strict=False)),
            ]
            result.append(("\n".join([*lines, "Answer:"]), row[-1]))
    except (csv.Error, DataError) as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
    return result


def _question(context: str, texts: Sequence[str], right: int, topic: str = "") -> Question:
    return Question([(context, " " + text) for text in texts], right, topic)


def _text(example: dict[str, Any], key: str) -> str:
    text = example.get(key)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{key} must be a non-empty string")
    return text


def _index(answer: Any, known: Sequence[Any]) -> int:
    """Return the index of the right answer, which may be a number or a label."""
    names = list(map(str, known))
    if answer is None:
        raise DataError(f"no answer, neither here nor in ...{LABELS} in the same directory")
    if isinstance(answer, (bool, float)) or str(answer) not in names:
        raise DataError(f"the answer must be one of {', '.join(names)}, not {escape(repr(answer)):.40}")
    return names.index(str(answer))


def _cleaned(text: str) -> str:
    """Remove WikiHow's markup from a HellaSwag text."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


# Scoring


class Benchmark:
    """Tokenized questions. `spans` has all choices of all questions, in order."""

    def __init__(self, questions: list[Question], tokenizer: Tokenizer, seq_len: int) -> None:
        self.questions, self.spans = questions, list[Span]()
        for number, question in enumerate(questions, 1):
            try:
                self.spans += _spans(question, tokenizer, seq_len)
            except DataError as error:
                raise DataError(f"question {number}: {error}") from None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> dict[str, Any]:
        """Return the metrics by their names in lm-eval. Collective.

        `acc` picks the choice with the lowest summed loss. For cloze questions, it compares with greedy
        decoding. `acc_norm` picks by loss per character. `perplexity` covers the predicted words. `subjects`
        has an `acc` for each topic. `loss` sums the losses of all choices.
        """
        result = with_progress(partial(likelihoods, scorer), self.spans, scorer.comm, progress)
        end, right, topics = 0, [], dict[str, list[int]]()
        for place, (choices, answer, topic) in enumerate(self.questions):
            losses, greedy = result[end : end + len(choices)].T
            end += len(choices)
            lengths = [len(text) - 1 for _, text in choices]  # without the leading space
            acc = greedy[0] == 1 if len(choices) == 1 else losses.argmin() == answer
            right.append((acc, (losses / lengths).argmin() == answer))
            topics.setdefault(topic, []).append(place)
        fractions, total = np.array(right, float), float(result[:, 0].sum())
        (acc, acc_norm), mean = fractions.mean(0).tolist(), total / len(result)
        return {
            "acc": acc,
            "examples": len(right),
            "acc_norm": acc_norm,
            "perplexity": math.exp(mean) if mean < 700 else None,
            "subjects": {topic: float(fractions[places, 0].mean()) for topic, places in topics.items()},
            "loss": total,
        }


class HellaSwag:
    """A training metric: HellaSwag's `acc_norm`."""

    def __init__(self, comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> None:
        self._benchmark = load_benchmark(comm, "hellaswag", path, tokenizer, seq_len)

    def fields(self, scorer: Scorer) -> dict[str, Any]:
        result = self._benchmark.measure(scorer)
        return {"hellaswag": result["acc_norm"], "hellaswag_examples": result["examples"]}

    @staticmethod
    def words(metrics: dict[str, float]) -> str:
        return f"HellaSwag {metrics['hellaswag']:.1%} of {metrics['hellaswag_examples']:,}"


def load_benchmark(comm: Comm, name: str, path: Path, tokenizer: Tokenizer, seq_len: int) -> Benchmark:
    """Read the files on rank 0 and tokenize them on every rank. Collective."""
    questions = on_root(comm, lambda: read_questions(name, path))
    try:
        return Benchmark(questions, tokenizer, seq_len)
    except DataError as error:
        raise collective_error(DataError(f"{path}, {error}")) from None


def _spans(question: Question, tokenizer: Tokenizer, seq_len: int) -> list[Span]:
    """Return a span for each choice. If it does not fit the context, the start of the text is cut off."""
    starts: dict[str, int] = {}
    spans = []
    for context, text in question.choices:
        start = context.rstrip()  # Trailing blanks belong to the next token.
        if start not in starts:
            starts[start] = len(tokenizer.encode_prompt(start))
        whole = np.array(tokenizer.encode_prompt(context + text))
        first = starts[start]
        if not 0 < first < len(whole):
            raise DataError("the context or the continuation has no tokens")
        spans.append(cut_to_fit(whole, first, seq_len))
    return spans


def cut_to_fit(ids: Array, first: int, seq_len: int) -> Span:
    """Return a span that predicts from index `first` on. If it does not fit the context, its start is cut."""
    gone = max(0, len(ids) - seq_len - 1)
    return Span(ids[gone:], max(1, first - gone))


def likelihoods(
    scorer: Scorer, spans: Sequence[Span], advanced: Callable[[int, int], None] = lambda done, tokens: None
) -> Array:
    """Return each span's summed loss, and 1 if greedy decoding produces it: (n, 2). Collective.

    Only predicted tokens are scored. Spans that differ only in their last token share a sequence.
    """
    result = np.zeros((len(spans), 2))
    together: dict[bytes, list[int]] = {}
    for i, span in enumerate(spans):
        together.setdefault(np.asarray(span.ids[:-1], np.int32).tobytes(), []).append(i)

    k, config = scorer.model.kernels, scorer.model.config
    inputs, outputs = k.zeros(AT_ONCE, config.n_embd), k.zeros(AT_ONCE, config.padded_vocab)

    def score(rows: list[list[int]]) -> None:
        scored = _of_sequences(scorer, [[spans[i] for i in row] for row in rows], inputs, outputs)
        result[[i for row in rows for i in row]] = scored

    scorer.in_batches(spans, list(together.values()), score, advanced)
    scorer.comm.sum(result)  # Each element is nonzero on at most one rank.
    return result


def _of_sequences(scorer: Scorer, rows: list[list[Span]], inputs: Array, outputs: Array) -> Array:
    """Return (n, 2) as `likelihoods`; the spans of a row share its tokens."""
    scorer.put([row[0] for row in rows])
    around = scorer.run("hidden", lambda work: work.forward(scorer.tokens))
    k, work = scorer.model.kernels, scorer.work
    assert work is not None
    hidden = k.to_host(around.hidden).reshape(*work.shape, -1)
    spans = [(i, span) for i, row in enumerate(rows) for span in row]
    states = np.concatenate([hidden[i, span.first - 1 : len(span.ids) - 1] for i, span in spans])
    targets = np.concatenate([span.ids[span.first :] for _, span in spans])
    each = np.empty((len(states), 2))  # the loss of each target, and whether its logit is the maximum
    for start in range(0, len(states), AT_ONCE):
        some = slice(start, min(start + AT_ONCE, len(states)))
        count = some.stop - start
        k.put(inputs[:count], states[some])
        work.logits(outputs[:count], inputs[:count])
        logits = k.to_host(outputs[:count])[:, : scorer.model.config.vocab_size]
        top = logits.max(1)
        hit = logits[np.arange(count), targets[some]]
        total = np.exp(logits - top[:, None]).sum(1, dtype=np.float64)
        each[some, 0] = np.log(total) + top - hit
        each[some, 1] = hit == top
    starts = np.cumsum([0, *(span.count for _, span in spans[:-1])])
    sums = np.add.reduceat(each[:, 0], starts)
    return np.stack([sums, np.minimum.reduceat(each[:, 1], starts)], axis=1)

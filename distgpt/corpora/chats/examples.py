"""Chats for training: rows of JSON lines, their tokens, and batches.

A row is one of

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}     ShareGPT
    {"prompt": "…", "completion": "…"}      or "response"; or "question" and "answer"
    {"instruction": "…", "input": "…", "output": "…"}        Alpaca
    {"text": "…"}

The loss counts only answers, each with its end token, and all of a plain text, which is split if it is longer
than a sequence. Sequences contain whole examples, which do not attend to each other, and may end with
padding, which the loss ignores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.batches import ArrayTokens, Batches, Window
from distgpt.core.data.loading import Corpus, DataRequest
from distgpt.core.ops.api import IGNORE_INDEX, Array
from distgpt.corpora.chats.format import ChatFormat, Example, Message, checked_messages
from distgpt.corpora.chats.sources import rows
from distgpt.corpora.packing import pack

FEW = 100  # examples
FEW_TOKENS = 500  # of held-out answers
SHAREGPT = {"human": "user", "gpt": "assistant"}  # ShareGPT's names for roles
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
SHAPES = (
    "'messages', 'conversations', 'prompt' with 'completion', 'question' with 'answer', 'instruction' with"
    " 'output', or 'text'"
)


def read_examples(path: Path, chat: ChatFormat) -> Iterator[Example]:
    """Yield the tokens of each row of a file, or of all files in a directory."""
    for where, row in rows(path):
        try:
            yield example_of(row, chat)._replace(where=where)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def example_of(row: Any, chat: ChatFormat) -> Example:
    """Return the tokens of a row and the loss mask. Raises a DataError for an invalid row."""
    if not isinstance(row, dict):
        raise DataError("not a JSON object")
    if "messages" in row:
        return _chat(checked_messages(row["messages"]), chat)
    if "conversations" in row:
        return _chat(checked_messages(_from_sharegpt(row["conversations"])), chat)
    for question, answer in PAIRS:
        if question in row and answer in row:
            return _chat(_turn(_text(row, question), _text(row, answer)), chat)
    if "instruction" in row and "output" in row:
        given = _text(row, "input") if row.get("input") else ""
        asked = "\n\n".join(text for text in (_text(row, "instruction"), given) if text)
        return _chat(_turn(asked, _text(row, "output")), chat)
    if "text" in row:
        return _plain(_text(row, "text"), chat)
    names = escape(", ".join(map(repr, row))) or "nothing"
    raise DataError(f"it has {names:.200} but requires {SHAPES}")


def _text(row: dict[str, Any], name: str) -> str:
    text = row[name]
    if not isinstance(text, str):
        raise DataError(f"{name!r} is not a string")
    return text


def _from_sharegpt(turns: Any) -> Any:
    """Convert ShareGPT turns to messages. `checked_messages` reports their errors."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    roles = [turn.get("from") for turn in turns]
    named = [SHAREGPT.get(role, role) if isinstance(role, str) else role for role in roles]
    return [{"role": role, "content": turn.get("value")} for role, turn in zip(named, turns, strict=True)]


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _chat(messages: list[Message], chat: ChatFormat) -> Example:
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers:
        raise DataError("the chat has no answer to train on")
    if not all(text.strip() for text in answers):
        raise DataError("an answer is empty")
    return chat.example(messages)


def _plain(text: str, chat: ChatFormat) -> Example:
    """Return plain text as an example with its end token. The loss ignores the first tokens of prompts."""
    tokenizer = chat.tokenizer
    if not text.strip():
        raise DataError("the text is empty")
    ends = [token for token in tokenizer.ends if token not in tokenizer.first]
    ids = [*tokenizer.encode_prompt(text), *ends[:1]]
    learned = np.ones(len(ids), np.uint8)
    learned[: len(tokenizer.first)] = 0
    return Example(np.array(ids, tokenizer.encode("").dtype), learned, is_text=True)


class Examples(ArrayTokens):
    """The concatenated inputs of all examples, and as many targets (int32), some IGNORE_INDEX.

    Example i is [starts[i], starts[i + 1]).
    """

    def __init__(self, inputs: Array, targets: Array, starts: Array) -> None:
        super().__init__(inputs)
        self.targets, self.starts = targets, starts
        for part in (targets, starts):
            self.fingerprint = f"crc32:{crc32(part.data.cast('B'), int(self.fingerprint[6:], 16)):08x}"


class ExampleBatches(Batches):
    """The global batches of a run whose rows are packed examples."""

    def __init__(self, examples: Examples, seq_len: int, batch_size: int, seed: int) -> None:
        super().__init__(examples, seq_len, batch_size, seed, shift=False)
        self.examples = examples
        self.plan = pack(examples.starts[:-1], len(examples), seq_len, whole=True)
        self.windows_per_epoch = len(self.plan)
        until = np.cumsum(np.append(0, examples.targets != IGNORE_INDEX))
        of_piece = until[self.plan.starts + self.plan.lengths] - until[self.plan.starts]
        self._learned = np.add.reduceat(of_piece, self.plan.ends[:-1])  # counted targets of each row

    def notes(self, steps: int) -> Iterator[str]:
        examples, rows = self.examples, self.windows_per_epoch
        full, learned = len(examples) / (rows * self.seq_len), self._learned.sum() / len(examples)
        batch_size = len(self._numbers)
        yield (
            f"{count(len(examples.starts) - 1, 'example')} of {len(examples):,} tokens,"
            f" {learned:.0%} of them trained on, in {count(rows, 'sequence')}, {full:.0%} full:"
            f" {batch_size * steps / rows:.3g} epochs are {count(steps, 'step')}"
            f" of {count(batch_size, 'sequence')}"
        )

        if (few := len(examples.starts) - 1) < FEW:
            yield (
                f"{count(few, 'example')}: too few to learn more than these answers; a few hundred change the"
                " style of answers, a few thousand teach a task"
            )

    def counted_fraction(self, step: int) -> float:
        rows = self._order(step, slice(None))[0]
        return float(self._learned[rows].sum()) / (len(rows) * self.seq_len)

    def fill(
        self, step: int, which: slice, x_out: Array, y_out: Array, positions_out: Array | None = None
    ) -> None:
        assert positions_out is not None
        x_out[:], y_out[:] = 0, IGNORE_INDEX
        for row, x, y, positions in zip(
            self._order(step, which)[0], x_out, y_out, positions_out, strict=True
        ):
            at = 0
            for start, length in self.plan.row(int(row)):
                here, there = slice(at, at + length), slice(start, start + length)
                x[here], y[here] = self.examples.read(start, start + length), self.examples.targets[there]
                positions[here] = np.arange(length)
                at += length
            positions[at:] = np.arange(len(positions) - at)


@dataclass(frozen=True, slots=True)
class ChatCorpus(Corpus):
    """Chats whose answers are trained on and, if held out, scored."""

    is_text = False  # answers end with tokens that are not text

    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        assert isinstance(self.train, Examples)
        return ExampleBatches(self.train, run.model.seq_len, run.train.batch_size, run.train.seed)

    def held_out_windows(self, seq_len: int, most: int) -> list[Window]:
        """Return the first examples, with at least `most` counted targets (0: all)."""
        examples, result, answers = self.held_out, list[Window](), 0
        assert isinstance(examples, Examples)
        for start, stop in pairwise(examples.starts.tolist()):
            targets = examples.targets[start:stop]
            ids = np.append(examples.read(start, stop), targets[-1:].clip(0).astype(np.uint32))
            result.append(Window(ids, learned := targets != IGNORE_INDEX))
            answers += int(learned.sum())
            if 0 < most <= answers:
                break
        return result


class _Chats:
    """The data kind of --chats."""

    def refuse_missing(self, request: DataRequest) -> None:
        """Do nothing, because `load` checks the chats."""

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        """Read the examples on rank 0. Validation examples are spread over the whole file."""
        tokenizer, path, val_fraction = request.existing, Path(request.data), request.val_fraction
        if tokenizer is None:
            raise collective_error(DataError("training on chats requires weights with a tokenizer"))

        def read() -> list[Examples]:
            result = _fitting(path, ChatFormat(tokenizer), request.seq_len, say)
            held_out = np.diff(np.floor(np.arange(len(result) + 1) * val_fraction)) > 0
            if val_fraction and not held_out.any():
                raise DataError(
                    f"--val-fraction {val_fraction} of {count(len(result), 'example')} in {path} is"
                    " 0 examples"
                )
            parts = (~held_out, held_out) if val_fraction else (~held_out,)
            together = [_together([result[i] for i in np.flatnonzero(part)]) for part in parts]
            answers = int((together[-1].targets != IGNORE_INDEX).sum())
            if val_fraction and answers < FEW_TOKENS:
                say(f"the held-out answers have only {count(answers, 'token')}, so their loss is imprecise")
            return together

        parts = on_root(comm, read)
        return ChatCorpus(tokenizer, parts[0], parts[1] if val_fraction else None)


CHATS = _Chats()


def _fitting(path: Path, chat: ChatFormat, seq_len: int, say: Say) -> list[Example]:
    """Read the examples, cut to the context. Skip examples that have no answer left."""
    result, cut, lost = [], 0, 0
    for ids, learned, is_text, _ in read_examples(path, chat):
        # Each part of a text predicts the first token of the next one.
        starts = range(0, len(ids) - 1, seq_len) if is_text else (0,)
        parts = [(ids[i : i + seq_len + 1], learned[i : i + seq_len + 1]) for i in starts]
        cut += not is_text and len(ids) > seq_len + 1
        kept = [Example(*part) for part in parts if part[1][1:].any()]
        result += kept
        lost += not kept
    limit = f"{seq_len + 1} tokens (--seq-len)"
    if not result:
        raise DataError(
            f"{path}: no example has an answer within its first {limit}; set a larger one, or shorten the"
            " prompts"
        )
    if cut or lost:
        without = f"; skipped {lost:,} without an answer before the cut" if lost else ""
        say(f"{cut:,} of {count(len(result) + lost, 'example')} are cut after {limit}{without}")
    return result


def _together(examples: list[Example]) -> Examples:
    inputs = np.concatenate([each.ids[:-1] for each in examples])
    targets = [np.where(e.learned[1:], e.ids[1:].astype(np.int32), IGNORE_INDEX) for e in examples]
    lengths = [len(each.ids) - 1 for each in examples]
    return Examples(
        inputs, np.concatenate(targets).astype(np.int32), np.cumsum([0, *lengths], dtype=np.int64)
    )


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError unless the run starts from trained weights."""
    if not t.init:
        raise UsageError("training on chats requires a pretrained model; use distgpt tune --weights")

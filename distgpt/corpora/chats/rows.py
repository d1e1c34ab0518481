"""Rows of chats to learn from, as people have them: JSON lines in, tokens and what of them is learned out.

A row is one of

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}     as ShareGPT's
    {"prompt": "…", "completion": "…"}
    {"instruction": "…", "input": "…", "output": "…"}        as Alpaca's
    {"text": "…"}

Of a chat the answers alone are learned, each with the token that ends it; of a plain text everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.checked import LARGEST_JSON, parse_json
from distgpt.core.base.errors import DataError, escape
from distgpt.corpora.chats.format import ChatFormat, Example, Message, checked_messages
from distgpt.corpora.prepare.documents import LINES, Input, find_inputs, opened

SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names for roles
EXAMPLE = '{"prompt": "Who are you?", "completion": "A model."}'
SHAPES = '"messages", "conversations", "prompt" with "completion", "instruction" with "output", or "text"'


def read_examples(path: Path, chat: ChatFormat) -> Iterator[Example]:
    """Yield the tokens of each row of a file, or of those in a folder.

    A DataError names the file and the first line that is no such row.
    """
    sources = [source for source in find_inputs((path,)) if source.kind == LINES or source.path == path]
    if not sources:
        raise DataError(
            f"{path} holds no chats, which are lines of JSON in files that end in .jsonl or .jsonl.gz"
        )
    for source in sources:
        yield from _of_file(source, chat)


def _of_file(source: Input, chat: ChatFormat) -> Iterator[Example]:
    number, rows, path = 0, 0, source.path
    with opened(source) as (stream, _):
        while line := stream.readline(LARGEST_JSON):
            number += 1
            if len(line) == LARGEST_JSON:
                raise DataError(f"{path}, line {number} is longer than {LARGEST_JSON >> 20} MiB")
            if not line.strip():
                continue
            try:
                row = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                example = example_of(row, chat)
            except (DataError, ValueError) as error:
                is_text = isinstance(error, JSONDecodeError) and not line.lstrip().startswith((b"{", b"["))
                plain = f"it is not JSON, such as {EXAMPLE}; to train on plain text, use distgpt train"
                raise DataError(f"{path}, line {number}: {plain if is_text else error}") from None
            yield example
            rows += 1
    if not rows:
        raise DataError(f"{path} holds no rows")


def example_of(row: Any, chat: ChatFormat) -> Example:
    """Return the tokens of a row, and which of them are learned; a DataError says what is wrong with it."""
    if not isinstance(row, dict):
        raise DataError("it is not a JSON object")
    if "messages" in row:
        return _chat(checked_messages(row["messages"]), chat)
    if "conversations" in row:
        return _chat(checked_messages(_from_sharegpt(row["conversations"])), chat)
    if "prompt" in row and "completion" in row:
        return _chat(_turn(_text(row, "prompt"), _text(row, "completion")), chat)
    if "instruction" in row and "output" in row:
        given = _text(row, "input") if row.get("input") else ""
        asked = "\n\n".join(text for text in (_text(row, "instruction"), given) if text)
        return _chat(_turn(asked, _text(row, "output")), chat)
    if "text" in row:
        return _plain(_text(row, "text"), chat)
    names = escape(", ".join(map(repr, row))) or "nothing"
    raise DataError(f"it has {names:.200}, and not {SHAPES}")


def _text(row: dict[str, Any], name: str) -> str:
    text = row[name]
    if not isinstance(text, str):
        raise DataError(f"{name!r} is no text")
    return text


def _from_sharegpt(turns: Any) -> Any:
    """Return the same turns as messages; what is wrong with them is found there."""
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
        raise DataError("the chat has no answer: nothing of it can be learned")
    if not all(text.strip() for text in answers):
        raise DataError("an answer is empty")
    return chat.example(messages)


def _plain(text: str, chat: ChatFormat) -> Example:
    """Return a text's tokens behind those that begin a prompt, which are not learned, and its end."""
    tokenizer = chat.tokenizer
    if not text.strip():
        raise DataError("the text is empty")
    ends = [token for token in tokenizer.ends if token not in tokenizer.first]
    ids = [*tokenizer.encode_prompt(text), *ends[:1]]
    learned = np.ones(len(ids), np.uint8)
    learned[: len(tokenizer.first)] = 0
    return Example(np.array(ids, tokenizer.encode("").dtype), learned)

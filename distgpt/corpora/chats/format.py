"""The chat format of a model: from messages to tokens, with the tokens that belong to answers."""

from __future__ import annotations

import json
import re
import secrets
import select
import subprocess
import threading
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.base.errors import DataError, did_you_mean, escape
from distgpt.core.base.system import python
from distgpt.core.data.tokenizers import BytesDecoder, Ids, Tokenizer, id_dtype
from distgpt.core.saved.modelfile import read_description
from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer

ROLES = ("system", "user", "assistant")
Message = dict[str, str]  # "role" and "content"

# Used if a tokenizer has both tokens.
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# For all other tokenizers. An answer ends with the document separator, if any, and the user's turn.
TURN = "\n\nUser:\n"
PLAIN = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}{{ eos_token }}\n\nUser:\n"
    "{% elif message.role == 'user' %}"
    "{% if loop.first or loop.previtem.role != 'assistant' %}User:\n{% endif %}"
    "{{ message.content }}\n\nAssistant:\n"
    "{% else %}{{ message.content }}\n\n{% endif %}"
    "{% endfor %}"
)

# Marks in a template's input: two characters that text should not contain, and an unpredictable number.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
BEGIN, END = "begin", "end"  # start and end of an answer


# -- third-party templates, rendered in a process with limits on time, memory and output

SECONDS = 5.0  # per text, including the start of the process

_WORKER = str(Path(__file__).with_name("worker.py"))


class Renderer:
    """A process that renders templates. It starts on first use, and again after it was killed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Return the text of a template. Raises a DataError if the template fails."""
        line = json.dumps({"source": source, "values": values}).encode() + b"\n"
        with self._lock:
            result = self._asked(line)
        if "error" in result:
            raise DataError(f"the model's chat template: {escape(result['error'])}")
        return result["text"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _asked(self, line: bytes) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            # A separate session, so that Ctrl-C in the terminal does not reach it.
            self._process = subprocess.Popen(
                python(_WORKER), stdin=pipe, stdout=pipe, stderr=none, start_new_session=True
            )
        process = self._process
        assert process.stdin and process.stdout
        waiting = select.poll()  # poll needs no timer thread, which would take longer than the text
        waiting.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline() if waiting.poll(1000 * self._seconds) else b""
        except OSError:
            answer = b""
        except BaseException:  # an interrupt; the next question must not get its answer
            self.close()
            raise
        if answer.endswith(b"\n"):
            result: dict[str, str] = json.loads(answer)
            return result
        self.close()
        return {"error": f"exceeded {self._seconds:g} s or the memory limit"}


@cache
def renderer() -> Renderer:
    """Return the renderer that all templates of this process share."""
    return Renderer()


# -- from messages to tokens


class Example(NamedTuple):
    """Tokens to train on; `learned` is 1 for tokens that the loss counts, 0 for the others (uint8)."""

    ids: Ids
    learned: Any
    is_text: bool = False  # a plain text, not a chat
    where: str = ""  # its file and line


class _Rendered(NamedTuple):
    """A rendered text as special tokens and the text between them, and the positions of the answers.

    An answer starts at -1 if the template cut off its start.
    """

    parts: list[str | int]
    answers: list[tuple[int, int]]


class ChatFormat:
    """The chat format of a tokenizer. Raises a DataError if its template cannot be used.

    Messages are always plain text: if a message spells a special token, it does not become that token. To
    ensure this, such spellings are replaced by marks before rendering and restored afterward.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        chat, special = tokenizer.chat, tokenizer.specials
        self.tokenizer, self._tokens = tokenizer, dict(chat.tokens) if chat else {}
        self.source, self.is_own = (chat.source if chat else ""), not (chat and chat.source)
        if self.is_own:
            self.source = CHATML if all(text in special for text in CHATML_TOKENS) else PLAIN
            if tokenizer.separator is not None:
                self._tokens["eos_token"] = tokenizer.decode([tokenizer.separator])
        self.stops = (TURN,) if self.source == PLAIN else ()
        self._spelling = {token: text for text, token in special.items()}
        self._mark = f"{OPEN}{secrets.randbelow(1 << 64)}."
        spelled = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "(?!)"
        self._spelled = re.compile(spelled)
        # One group, so that the regex engine checks their common prefix only once.
        self._between = re.compile(f"({self._mark}[^{CLOSE}]*{CLOSE}|(?:{spelled}))")
        self.ends = tuple(dict.fromkeys(tokenizer.ends + self._end_of_answer()))

    def describe(self) -> str:
        if not self.is_own:
            return "the model's own chat template"
        return "no chat template: " + ("User and Assistant as plain text" if self.stops else "ChatML")

    @property
    def is_taught(self) -> bool:
        """Whether the model appears to be trained on chats: it has a template or tokens for turns."""
        return self.source != PLAIN

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens before the next answer."""
        ids: list[int] = encode_parts(self.tokenizer, self._rendered(messages, True).parts)[0].tolist()
        return ids

    def example(self, messages: Sequence[Message]) -> Example:
        """Return the tokens of a chat. The loss counts its answers, each with its end token."""
        parts, answers = self._rendered(messages, False)
        if answers and answers[-1][0] < 0 and messages[-1]["role"] == "assistant":
            answers[-1] = self._behind_prompt(messages[:-1], parts), answers[-1][1]
        wanted = sum(message["role"] == "assistant" for message in messages)
        if len(answers) < wanted or any(first < 0 for first, _ in answers):
            raise DataError(
                "the model's chat template changes or drops an answer, so it cannot be trained on"
            )
        ids, ends = encode_parts(self.tokenizer, parts)
        starts, learned = np.concatenate([[0], ends[:-1]]), np.zeros(len(ids), np.uint8)
        for first, last in answers:
            learned[(ends > first) & (starts < last)] = 1
        return Example(ids, learned)

    def _behind_prompt(self, messages: Sequence[Message], parts: Sequence[str | int]) -> int:
        """Return where the last answer starts if the template cut off its start: after the answer's prompt.

        Templates do so to render thoughts differently. -1 if the text does not start with the prompt.
        """
        prompt, whole = (
            "".join(map(self._text, each)) for each in (self._rendered(messages, True).parts, parts)
        )
        return len(prompt) if whole.startswith(prompt) else -1

    def _end_of_answer(self) -> tuple[int, ...]:
        """Return the special token that the template puts after an answer, if any."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        parts, answers = self._rendered(chat, False)
        at = 0
        for part in parts:
            at += len(self._text(part))
            if answers and at == answers[-1][1] and isinstance(part, int):
                return (part,)
        return ()

    def _text(self, part: str | int) -> str:
        return part if isinstance(part, str) else self._spelling[part]

    def _rendered(self, messages: Sequence[Message], asks: bool) -> _Rendered:
        shown = [{**message, "content": self._marked(message)} for message in messages]
        values = {**self._tokens, "messages": shown, "add_generation_prompt": asks, "tools": None}
        if not self.is_own:
            return self._read(renderer().render(self.source, values))
        from distgpt.corpora.chats import worker  # a built-in template is trusted

        return self._read(worker.render(self.source, values))

    def _marked(self, message: Message) -> str:
        """Replace special tokens in a content by marks, and add marks around an answer.

        The marks are inside the surrounding blanks, because templates strip them.
        """
        special, text = self.tokenizer.specials, message["content"]
        text = self._spelled.sub(lambda found: f"{self._mark}{special[found[0]]}{CLOSE}", text)
        if message["role"] != "assistant":
            return text
        inner = text.strip()
        before, after = text[: text.find(inner)], text[text.find(inner) + len(inner) :]
        return f"{before}{self._mark}{BEGIN}{CLOSE}{inner}{self._mark}{END}{CLOSE}{after}"

    def _read(self, text: str) -> _Rendered:
        """Remove the marks from a rendered text, and separate its special tokens."""
        parts: list[str | int] = []
        texts: list[str] = []  # text since the last token, joined once to avoid copies
        answers: list[tuple[int, int]] = []
        at, begin, is_open = 0, -1, False  # open: the end of the last answer may follow, a token or a turn
        for piece in self._between.split(text):
            mark = piece[len(self._mark) : -1] if piece.startswith(self._mark) else ""
            if mark == BEGIN:
                begin = at
            elif mark == END:
                answers.append((begin, at))
                begin, is_open = -1, True
            else:
                part = self._text(int(mark)) if mark else self.tokenizer.specials.get(piece, piece)
                size = len(self._text(part))
                if is_open and piece.strip():
                    is_open = False
                    if closing := size if isinstance(part, int) else len(TURN) * part.startswith(self.stops):
                        answers[-1] = answers[-1][0], at + closing
                at += size
                if isinstance(part, str):
                    texts.append(part)
                else:
                    parts += ["".join(texts), part]
                    texts = []
        return _Rendered([part for part in (*parts, "".join(texts)) if part != ""], answers)


def encode_parts(tokenizer: Tokenizer, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
    """Return the ids of `parts` (text, or tokens as ids), and the position where each id ends.

    Positions count characters of the whole text, including spelled-out tokens.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.encode_parts(parts)
    if not isinstance(tokenizer, BytesDecoder):
        raise DataError(f"chats require a byte-level tokenizer, such as byte or BPE, not {tokenizer.kind!r}")
    dtype = id_dtype(tokenizer.size)
    result = [tokenizer.encode(part) if isinstance(part, str) else np.array([part], dtype) for part in parts]
    ids = np.concatenate([np.empty(0, dtype), *result])
    pieces = [tokenizer.pieces[i] for i in ids.tolist()]
    shown = (part.encode() if isinstance(part, str) else tokenizer.pieces[part] for part in parts)
    if (whole := b"".join(pieces)) != b"".join(shown):
        raise DataError(
            f"a tokenizer of kind {tokenizer.kind!r} cannot encode chats, because it changes text"
        )
    # Count characters that have started, because an id may be part of a character.
    begun = np.cumsum(np.frombuffer(whole, np.uint8) & 0xC0 != 0x80)
    return ids, begun[np.cumsum(list(map(len, pieces)), dtype=np.int64) - 1]


def was_tuned_on_chats(files: Collection[Path]) -> bool:
    """Return whether any of these weights files, model or adapter, was trained on chats."""
    return any(read_description(file).run.train.chats for file in files)


def checked_messages(value: Any) -> list[Message]:
    """Return the messages of untrusted JSON. A DataError names the message and the problem."""
    if not isinstance(value, list) or not value:
        raise DataError("messages must be a non-empty list")
    result = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise DataError(f"message {number} must be an object with a role and a content")
        if role not in ROLES:
            raise DataError(f"message {number}: unknown role {role!r:.40}{did_you_mean(role[:40], ROLES)}")
        content = message.get("content")
        if isinstance(content, list):  # OpenAI's clients send lists of parts
            texts = [
                part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
            ]
            known = [text for text in texts if isinstance(text, str)]
            content = "".join(known) if len(known) == len(content) else None
        if not isinstance(content, str):
            raise DataError(f"message {number}: content must be a string")
        result.append({"role": role, "content": content})
    return result

"""`distgpt chat`: chat with a model in a terminal or through a pipe, line by line."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from distgpt.core.base.errors import (
    DataError,
    DistgptError,
    StorageError,
    UsageError,
    did_you_mean,
    escape_model_text,
    one_line,
    print_lines,
)
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import Interrupted, PendingSignals, deferred_signals, signal_of
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.request import Request
from distgpt.corpora.chats.format import ChatFormat, Message

SHARE = 4  # at most 1/SHARE of the context is kept free for an answer
LONGEST = 1 << 20  # maximum bytes of a line
QUOTES = '"""'
COMMANDS = ("/reset", "/system", "/save", "/help", "/exit")
HELP = f"""\
/reset         clear the conversation
/system TEXT   set the system prompt; without TEXT: remove it
/save FILE     save the chat as a JSON line, {{"messages": [...]}}
/help          show this list
/exit          quit (or Ctrl-D)
To continue a message on the next line, end the line with \\, or enclose the message in {QUOTES}.
Ctrl-C stops an answer."""


class Conversation:
    """A chat between a user and a model. Not thread-safe: only one thread may use it and its engine.

    The engine must have a single slot, which caches the earlier turns.
    """

    def __init__(
        self, engine: Engine, chat: ChatFormat, settings: Request, context: int, system: str
    ) -> None:
        self._engine, self._chat, self._context = engine, chat, context
        stop = settings.stop + chat.stops
        self._settings = replace(settings, ends=chat.ends, stop=stop, overflow="stop", reuse=True)
        self.system, self.turns = system, list[Message]()
        self._ticket, self._count = -1, 0
        # Statistics of the last answer: tokens, seconds, and the Event's reason (None if interrupted).
        self.prompt = self.tokens = 0
        self.first = self.seconds = self._begun = 0.0
        self.reason: str | None = None

    @property
    def messages(self) -> list[Message]:
        """The system message, if any, and all turns."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def ask(self, text: str) -> int:
        """Add a user's turn. Return how many old turns were dropped because the context is full.

        An error or interrupt restores the previous turns.
        """
        before, self._begun = list(self.turns), time.perf_counter()
        self.turns.append({"role": "user", "content": text})
        try:
            prompt, seed = self._prompt(), (self._settings.seed + self._count) % (1 << 64)
            self._ticket = self._engine.submit(replace(self._settings, prompt=prompt, seed=seed))
        except BaseException:
            self.turns = before
            raise
        self._count += 1
        self.prompt, self.tokens, self.first, self.reason = len(prompt), 0, 0.0, None
        return len(before) + 1 - len(self.turns)

    def pieces(self) -> Generator[str]:
        """Yield the answer in pieces, some of them empty. Closing the generator ends the answer."""
        text = ""
        try:
            while not self._engine.is_idle:
                new = ""
                for event in self._engine.step():
                    self.first = self.first or time.perf_counter() - self._begun
                    self.tokens += event.token is not None
                    self.reason, new = event.reason, new + event.text
                text += new
                yield new
        finally:
            self._engine.cancel(self._ticket)
            self.seconds = time.perf_counter() - self._begun
            if text or self.reason:
                self.turns.append({"role": "assistant", "content": text})
            else:
                self.turns.pop()

    def _prompt(self) -> list[int]:
        """Return the tokens of all turns. If they are too many, drop the oldest until half is free."""
        room = self._context - min(self._settings.max_new_tokens, self._context // SHARE)
        prompt = self._chat.prompt(self.messages)
        while len(prompt) > room and len(self.turns) > 1:
            room = self._context // 2
            del self.turns[:2]
            prompt = self._chat.prompt(self.messages)
        if len(prompt) >= self._context:
            raise UsageError(
                f"the message makes a prompt of {len(prompt):,} tokens, but the context has only"
                f" {self._context:,}; shorten it"
            )
        return prompt


class Chat:
    """The chat loop. An error ends the message in a terminal, and the whole chat in a pipe."""

    def __init__(self, conversation: Conversation, with_speed: bool, greeting: str) -> None:
        self._conversation, self._with_speed = conversation, with_speed
        self._is_terminal, self._line = sys.stdin.isatty(), 0
        self._shown = escape_model_text if sys.stdout.isatty() else str
        self._asked = False
        if self._is_terminal:
            print_lines(greeting, err=True)
            with suppress(ImportError):
                import readline  # noqa: F401  # adds history and editing to input()

    def run(self) -> None:
        while True:
            try:
                text = self._message()
                if text is None or text.strip() in ("/exit", "/quit"):
                    break
                if text.strip():
                    self._asked = True
                    self._take(text)
            except UnicodeDecodeError:  # raised by input()
                _note("not valid UTF-8")
            except DistgptError as error:
                expected = isinstance(error, DataError | StorageError | UsageError)
                if not (self._is_terminal and expected):
                    raise
                _note(one_line(str(error)))
            except KeyboardInterrupt as error:
                if not self._is_terminal or getattr(error, "number", signal.SIGINT) != signal.SIGINT:
                    raise
                print(flush=True)
                _note("press Ctrl-D to exit")
        if not self._asked and not self._is_terminal:
            raise UsageError("standard input has no message")

    def _read(self, prompt: str) -> str | None:
        """Return a line without its line end, or None at the end of the input. Prompts only in a terminal."""
        if self._is_terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                print(flush=True)
                return None
        if self._is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line, self._line = sys.stdin.buffer.readline(LONGEST + 1), self._line + 1
        where = f"standard input, line {self._line}"
        if len(line) > LONGEST:
            raise DataError(f"{where} is longer than {LONGEST >> 20} MiB")
        try:
            return line.decode().rstrip("\r\n") if line else None
        except UnicodeDecodeError:
            raise DataError(f"{where} is not valid UTF-8") from None

    def _message(self) -> str | None:
        if (text := self._read("> ")) is None:
            return None
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES) and (more := self._read("... ")) is not None:
                text += "\n" + more
            return text.rstrip().removesuffix(QUOTES)
        while text.endswith("\\") and (more := self._read("... ")) is not None:
            text = text[:-1] + "\n" + more
        return text

    def _take(self, text: str) -> None:
        talk = self._conversation
        result = re.fullmatch(r"\s*(/[a-z]+)(?:\s+(.*))?", text, re.DOTALL)
        match (result[1], (result[2] or "").strip()) if result else ("", ""):
            case "", _:
                self._answer(text)
            case "/reset", _:
                talk.turns.clear()
                _note("conversation cleared")
            case "/system", rest:
                talk.system = rest
                _note("system prompt set" if rest else "system prompt removed")
            case "/save", rest:
                self._save(rest)
            case "/help", _:
                print_lines(HELP, err=True)
            case name, _:
                raise UsageError(f"{name} is not a command{did_you_mean(name, COMMANDS)}")

    def _answer(self, text: str) -> None:
        """Print an answer as it is generated. Ctrl-C ends it after the current step."""
        talk = self._conversation
        if forgotten := talk.ask(text):
            _note(f"the context is full; dropped the {count(forgotten, 'oldest message')}")
        pending = PendingSignals()
        try:
            with deferred_signals(pending), closing(talk.pieces()) as pieces:
                for piece in pieces:
                    print(self._shown(piece), end="", flush=True)
                    if pending.came:
                        break
        finally:  # An error must start on a new line.
            print(flush=True)
        if pending.came:
            number = signal_of(pending.exit_code)
            if number != signal.SIGINT or not self._is_terminal:
                raise Interrupted(number)
            _note("stopped")
        elif talk.reason != "stop":
            why = "the context is full" if talk.reason == "context" else "--max-new-tokens is reached"
            _note(f"the answer was cut off: {why}")
        if self._with_speed:
            rate = (talk.tokens - 1) / max(talk.seconds - talk.first, 1e-9) if talk.tokens > 1 else 0.0
            _note(
                f"{talk.prompt} + {talk.tokens} tokens, {talk.first:.3f} s to the first,"
                f" {rate:.1f} tokens/s afterwards"
            )

    def _save(self, rest: str) -> None:
        """Write the chat to a new file."""
        messages = self._conversation.messages
        if not rest or "\0" in rest:
            raise UsageError("/save requires a file name")
        path = Path(os.path.expanduser(rest))  # noqa: PTH111  # Path.expanduser rejects unknown users
        if not self._conversation.turns:
            raise UsageError("nothing to save yet")
        with storage_errors("write", path):
            is_there = path.exists()
        if is_there:
            raise UsageError(f"{path} already exists; choose another name")
        with atomic_file(path) as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n")
        _note(f"saved {count(len(messages), 'message')} as {path}")


def _note(text: str) -> None:
    """Print a message that is not part of the answer."""
    print_lines(f"({text})", err=True)

"""`distgpt chat`: a chat in a terminal, or through a pipe, line by line."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from distgpt.core.base.errors import (
    DataError,
    DistgptError,
    StorageError,
    UsageError,
    escape_model_text,
    nearest,
    one_line,
    print_lines,
)
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import Interrupted, PendingSignals, deferred_signals, signal_of
from distgpt.inference.generation.chat import Conversation

LONGEST = 1 << 20  # bytes of a line
QUOTES = '"""'
HELP = f"""\
/reset         forget all turns
/system TEXT   what the model is told before all turns; without TEXT: nothing
/save FILE     write the chat as a line of JSON, {{"messages": [...]}}
/help          these lines
/exit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next one; so does a message that begins with {QUOTES}, up to {QUOTES}.
Ctrl-C stops an answer."""


class Lines:
    """Lines from a terminal or a pipe. Only a terminal is asked for them."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._number = 0
        if self.is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # input() then has a history and can be edited

    def read(self, prompt: str) -> str | None:
        """Return a line without its end, or None at the end of all."""
        if self.is_terminal and sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                print(flush=True)
                return None
        if self.is_terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        line, self._number = sys.stdin.buffer.readline(LONGEST + 1), self._number + 1
        where = f"standard input, line {self._number}"
        if len(line) > LONGEST:
            raise DataError(f"{where} is longer than {LONGEST >> 20} MiB")
        try:
            return line.decode().rstrip("\r\n") if line else None
        except UnicodeDecodeError:
            raise DataError(f"{where} is not valid UTF-8") from None

    def message(self) -> str | None:
        """Return a message of one line or several."""
        if (text := self.read("> ")) is None:
            return None
        if text.lstrip().startswith(QUOTES):
            text = text.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES) and (more := self.read("... ")) is not None:
                text += "\n" + more
            return text.rstrip().removesuffix(QUOTES)
        while text.endswith("\\") and (more := self.read("... ")) is not None:
            text = text[:-1] + "\n" + more
        return text


class Chat:
    """The loop of a chat. In a terminal an error ends a message, in a pipe all of it."""

    def __init__(self, conversation: Conversation, with_speed: bool, greeting: str) -> None:
        self._conversation, self._with_speed, self._lines = conversation, with_speed, Lines()
        self._shown = escape_model_text if sys.stdout.isatty() else str
        self._saved: set[Path] = set()
        self._asked = False
        if self._lines.is_terminal:
            print_lines(greeting, err=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "help": lambda _: print_lines(HELP, err=True),
        }

    def run(self) -> None:
        """Answer message by message until there are no more."""
        while True:
            try:
                text = self._lines.message()
                if text is None or text.strip() in ("/exit", "/quit"):
                    break
                if text.strip():
                    self._take(text)
            except UnicodeDecodeError:  # of input()
                _note("that is not valid UTF-8")
            except DistgptError as error:
                if not self._lines.is_terminal or not isinstance(
                    error, DataError | StorageError | UsageError
                ):
                    raise
                _note(one_line(str(error)))
            except KeyboardInterrupt as error:
                if not self._lines.is_terminal or getattr(error, "number", signal.SIGINT) != signal.SIGINT:
                    raise
                print(flush=True)
                _note("Ctrl-D leaves")
        if not self._asked and not self._lines.is_terminal:
            raise UsageError("standard input holds no message")

    def _take(self, text: str) -> None:
        """Do what a command says, or answer a message."""
        self._asked = True
        found = re.fullmatch(r"\s*/([a-z]+)(?:\s+(.*))?", text, re.DOTALL)
        if not found:
            self._answer(text)
            return
        name, rest = found[1], (found[2] or "").strip()
        if name not in self._commands:
            names = [f"/{known}" for known in (*self._commands, "exit")]
            raise UsageError(f"/{name} is no command{nearest(f'/{name}', names)}")
        self._commands[name](rest)

    def _answer(self, text: str) -> None:
        """Print an answer as it comes. Ctrl-C ends it; the step under way is finished first."""
        conversation = self._conversation
        if forgotten := conversation.ask(text):
            _note(f"the context is full: the {count(forgotten, 'oldest message')} were forgotten")
        pending = PendingSignals()
        try:
            with deferred_signals(pending), closing(conversation.pieces()) as pieces:
                for piece in pieces:
                    print(self._shown(piece), end="", flush=True)
                    if pending.came:
                        break
        finally:  # an error begins on a line of its own
            print(flush=True)
        if pending.came:
            number = signal_of(pending.exit_code)
            if number != signal.SIGINT or not self._lines.is_terminal:
                raise Interrupted(number)
            _note("stopped")
        elif conversation.answer.reason != "stop":
            full = conversation.answer.reason == "context"
            _note("the answer ends here, as " + ("the context is full" if full else "--max-new-tokens says"))
        if self._with_speed:
            _note(conversation.answer.describe())

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        _note("all turns are forgotten")

    def _system(self, rest: str) -> None:
        self._conversation.system = rest
        _note("the model is told so from now on" if rest else "the model is told nothing before the turns")

    def _save(self, rest: str) -> None:
        """Write the chat; a file that was there before is not touched."""
        if not rest or "\0" in rest:
            raise UsageError("/save needs the name of a file")
        path = Path(os.path.expanduser(rest))  # noqa: PTH111  # of Path it fails where there is no such user
        if not self._conversation.turns:
            raise UsageError("there is nothing to save yet")
        with storage_errors("write", path):
            is_there = path.exists()
        if is_there and path.absolute() not in self._saved:
            raise UsageError(f"{path} exists already; choose another name")
        with atomic_file(path) as file:
            messages = {"messages": self._conversation.messages}
            file.write(json.dumps(messages, ensure_ascii=False).encode() + b"\n")
        self._saved.add(path.absolute())
        _note(f"saved {count(len(messages['messages']), 'message')} as {path}")


def _note(text: str) -> None:
    """Say something that is no answer."""
    print_lines(f"({text})", err=True)

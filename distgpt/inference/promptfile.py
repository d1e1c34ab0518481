"""Files of prompts and of what became of them: JSON lines, checked before anything is computed, resumable.

A prompt: {"prompt": "Once", "max_new_tokens": 9, "temperature": 0.8, …}; an answer: {"line": 1, "request": …,
"model": …, "prompt": "Once", "choices": [{"text": …, "tokens": […], "reason": …}]}. While they are computed,
answers are appended as they are finished; at the end they are put into the order of the prompts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from distgpt.checked import parse_json
from distgpt.config import nearest
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError, escape
from distgpt.files import append, atomic_file, open_regular, storage_errors
from distgpt.inference.request import Request, request_of

# What a line may set besides its prompt, with the types that JSON gives it.
SETTINGS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "n", "logprobs"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    "stop": (str, list),
    "prompt_logprobs": (bool,),
}
_NAMES: dict[tuple[type, ...], str] = {
    (int,): "integer",
    (int, float): "number",
    (str, list): "text or list of texts",
    (bool,): "boolean",
}
LONGEST_PROMPT = 64 << 20  # bytes of a line
BEGINNING = b'{"line": '  # of every answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of the file: its number from 1, its text and tokens, and the settings of its request."""

    line: int
    text: str
    tokens: list[int]
    settings: dict[str, Any]

    @property
    def mark(self) -> str:
        """What tells its request from others."""
        asked = json.dumps([self.tokens, self.settings], sort_keys=True)
        return sha256(asked.encode()).hexdigest()[:16]

    def request(self) -> Request:
        return request_of(self.tokens, **self.settings)

    def answer(self, samples: Sequence[dict[str, Any]], model: str) -> bytes:
        """The line of an answer by the model of this mark."""
        about = {"line": self.line, "request": self.mark, "model": model}
        about |= {"prompt": self.text, "choices": samples}
        return json.dumps(about).encode() + b"\n"


def read_prompts(path: Path, tokenizer: Tokenizer, defaults: dict[str, Any]) -> list[Prompt]:
    """All prompts, with `defaults` for what they do not set; a DataError names the first wrong line."""
    found = []
    with storage_errors("read", path), open_regular(path) as file:
        number = 0
        while line := file.readline(LONGEST_PROMPT):
            number += 1
            if len(line) == LONGEST_PROMPT:
                raise DataError(f"{path}, line {number} is longer than {LONGEST_PROMPT >> 20} MiB")
            if not line.strip():
                continue
            try:
                found.append(_prompt(number, line, tokenizer, defaults))
            except (UsageError, DataError, ValueError) as error:
                raise DataError(f"{path}, line {number}: {error}") from None
    if not found:
        raise DataError(f"{path} holds no prompts")
    return found


def _prompt(number: int, line: bytes, tokenizer: Tokenizer, defaults: dict[str, Any]) -> Prompt:
    given = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    if not isinstance(given, dict):
        raise DataError("it is not a JSON object")
    text = given.pop("prompt", None)
    if not isinstance(text, str):
        raise DataError('it has no text "prompt"')
    for name, value in given.items():
        if name not in SETTINGS:
            raise DataError(f"the setting {escape(name)!r} is unknown{nearest(name, SETTINGS)}")
        if type(value) not in SETTINGS[name]:
            raise DataError(f"{name} is {escape(json.dumps(value)):.80}, no {_named(name)}")
    stop = given.get("stop", defaults["stop"])
    texts = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(each, str) for each in texts):
        raise DataError("stop is no text or list of texts")
    prompt = Prompt(number, text, tokenizer.encode(text).tolist(), {**defaults, **given, "stop": texts})
    prompt.request()
    return prompt


def _named(name: str) -> str:
    return _NAMES[SETTINGS[name]]


class Answers:
    """The file of answers, of a run that begins or resumes. One process at a time.

    `model`: what tells answers of this model from those of others.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], model: str) -> None:
        self.path, self._model = path, model
        self._prompts = {prompt.line: prompt for prompt in prompts}
        self._places: dict[int, tuple[int, int]] = {}  # of each answer, by its prompt's line: start and end
        self._end = 0
        if path.exists():
            self._resume()

    @property
    def done(self) -> set[int]:
        """Lines of prompts that are answered."""
        return set(self._places)

    def add(self, answers: Sequence[tuple[Prompt, Sequence[dict[str, Any]]]]) -> None:
        """Append answers: all of them, or on failure none."""
        lines = [prompt.answer(samples, self._model) for prompt, samples in answers]
        with storage_errors("write", self.path):
            append(self.path, b"".join(lines))
        for (prompt, _), line in zip(answers, lines, strict=True):
            self._note(prompt.line, len(line))

    def finish(self) -> None:
        """Put the answers into the order of the prompts, if they are not in it."""
        if list(self._places) == sorted(self._places):
            return
        with open_regular(self.path) as old, atomic_file(self.path) as file:
            for _, (start, end) in sorted(self._places.items()):
                old.seek(start)
                file.write(old.read(end - start))

    def _note(self, number: int, size: int) -> None:
        self._places[number] = (self._end, self._end + size)
        self._end += size

    def _resume(self) -> None:
        """Take over what an earlier run has answered, and drop half a line."""
        with storage_errors("read", self.path), open_regular(self.path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self._note(self._of(line, number), len(line))
                elif not line.startswith(BEGINNING[: len(line)]):
                    raise self._foreign(number)
        with storage_errors("write", self.path):
            if self.path.stat().st_size > self._end:
                os.truncate(self.path, self._end)

    def _of(self, line: bytes, number: int) -> int:
        """Which prompt an answer belongs to."""
        try:
            found = parse_json(line)
        except ValueError:
            raise self._foreign(number) from None
        if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
            raise self._foreign(number)
        if found.get("model") != self._model:
            raise UsageError(
                f"{self.path}, line {number} was answered by another model, or in another dtype or context: "
                "repeat that command, or choose another --out"
            )
        asked = self._prompts.get(found["line"]) if type(found.get("line")) is int else None
        if asked is None or found.get("request") != asked.mark:
            raise UsageError(
                f"{self.path}, line {number} answers another prompt, or one with other settings: "
                "repeat that command, or choose another --out"
            )
        if asked.line in self._places:
            raise DataError(f"{self.path}, line {number} answers line {asked.line} of the prompts again")
        return asked.line

    def _foreign(self, number: int) -> DataError:
        return DataError(f"{self.path}, line {number} is no answer to a prompt; choose another --out")


@contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Lock the file of answers for this process, where locks exist; a new one that stays empty goes again."""
    while True:
        with storage_errors("write", path):
            descriptor, is_new = _opened(path)
        try:
            is_locked = _lock(descriptor, path)
            if is_locked and not _names(path, descriptor):
                continue  # whoever had it has removed or replaced it
            try:
                yield
            finally:
                with suppress(OSError):
                    is_empty = is_new and os.fstat(descriptor).st_size == 0
                    if is_empty and is_locked and _names(path, descriptor):
                        path.unlink()
            return
        finally:
            os.close(descriptor)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether this very call made the file."""
    how = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with suppress(FileExistsError):
            return os.open(path, how | os.O_CREAT | os.O_EXCL, 0o666), True
        with suppress(FileNotFoundError):  # gone in between
            return os.open(path, how), False


def _lock(descriptor: int, path: Path) -> bool:
    """Whether it is locked now; False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is writing {path}") from None
    except OSError:
        return False
    return True


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to this file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False

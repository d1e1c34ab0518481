"""`distgpt infer` with a file of prompts: JSON lines in, JSON lines out, on all ranks, resumable.

A prompt: {"prompt": "Once", "max_new_tokens": 9, "temperature": 0.8, …}. An answer: {"line": 1, "request": …,
"model": …, "prompt": "Once", "choices": [{"text": …, "tokens": […], "reason": …}]}. Answers are appended as
they finish. At the end, the file is sorted into the order of the prompts.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from distgpt.core.base.checked import LARGEST_JSON, parse_json
from distgpt.core.base.errors import DataError, UsageError, print_lines
from distgpt.core.base.files import append, atomic_file, locked, open_regular, storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import broadcast, gather, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine import Collector, Engine
from distgpt.core.generate.engine_setup import MOST_SLOTS, ModelSpec
from distgpt.core.generate.request import REQUEST_SETTINGS, Completion, Request

if TYPE_CHECKING:
    from distgpt.core.train.assessment import Progress

ROOM = 2 * MOST_SLOTS  # prompts per rank at a time, enough to keep all its slots busy
SYNC = 0.5  # seconds between two exchanges; an idle rank waits this long for the others
BEGINNING = b'{"line": '  # start of each line of answers

Answer = tuple[int, list[Completion]]  # request number, samples
Share = list[tuple[int, Request]]  # requests of one rank, with their numbers


def infer_file(
    spec: ModelSpec, path: Path, out: Path, defaults: Request, stage: Stage, progress: Progress
) -> None:
    """Answer every prompt of a file. `out` may already hold some of the answers. Collective.

    Invalid prompts raise an error before any are computed.
    """
    comm, loaded = stage.comm, spec.load(stage)
    slots = loaded.slots(MOST_SLOTS, defaults.lookup)
    engine, begun, made = loaded.engine(slots), time.perf_counter(), 0
    answers = Answers(out)
    with ExitStack() as stack:

        def begin() -> None:
            prompts = read_prompts(path, loaded.tokenizer, defaults, engine)
            stack.enter_context(reserved(out))
            drops = defaults.overflow == "shift" and slots.can_drop
            answers.begin(prompts, loaded.fingerprint(drops))
            progress.began(len(prompts), answers.done)
            stack.callback(progress.close)

        on_root(comm, begin)
        todo = answers.todo
        for result in distribute(comm, engine, [prompt.request for prompt in todo], ROOM):
            answers.add([(todo[number], samples) for number, samples in result])
            tokens = sum(len(sample.tokens) for _, samples in result for sample in samples)
            made += tokens
            progress.advanced(answers.done, tokens)
        if comm.rank != 0:
            return
        answers.finish()
    seconds = time.perf_counter() - begun
    summary = f"{count(len(todo), 'prompt')}, {count(made, 'token')} in {seconds:.2f} s"
    print_lines(f"{summary} ({made / seconds:.1f} tokens/s): {out}", err=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the file, with its line number (from 1), text and request."""

    line: int
    text: str
    request: Request

    @property
    def fingerprint(self) -> str:
        """Return a hash of the prompt's tokens and settings."""
        settings = {name: getattr(self.request, name) for name in REQUEST_SETTINGS}
        if not self.request.prompt_logprobs:  # Earlier versions wrote fingerprints without this setting.
            del settings["prompt_logprobs"]
        text = json.dumps([self.request.prompt, settings], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    def answer(self, samples: Sequence[Completion], model: str) -> bytes:
        """Return the output line; `model` is the model's fingerprint."""
        about = {"line": self.line, "request": self.fingerprint, "model": model, "prompt": self.text}
        return json.dumps({**about, "choices": [each.as_json() for each in samples]}).encode() + b"\n"


def read_prompts(path: Path, tokenizer: Tokenizer, defaults: Request, engine: Engine) -> list[Prompt]:
    """Read all prompts; `defaults` fill in omitted settings. A DataError names the first bad line."""
    result = []
    with storage_errors("read", path), open_regular(path) as file:
        number = 0
        while line := file.readline(LARGEST_JSON):
            number += 1
            if len(line) == LARGEST_JSON:
                raise DataError(f"{path}, line {number} is longer than {LARGEST_JSON >> 20} MiB")
            if not line.strip():
                continue
            try:
                prompt = _prompt(number, line, tokenizer, defaults)
                engine.check(prompt.request)
            except (UsageError, DataError, ValueError) as error:
                raise DataError(f"{path}, line {number}: {error}") from None
            result.append(prompt)
    if not result:
        raise DataError(f"{path} has no prompts")
    return result


def _prompt(number: int, line: bytes, tokenizer: Tokenizer, defaults: Request) -> Prompt:
    given = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    if not isinstance(given, dict):
        raise DataError("not a JSON object")
    text = given.pop("prompt", None)
    if not isinstance(text, str):
        raise DataError('no string "prompt"')
    tokens = tokenizer.encode_prompt(text)
    return Prompt(number, text, defaults.override(tokens, given, "overflow", "lookup"))


class Answers:
    """The output file, new or of an interrupted run. Only one process may write it at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self._model = path, ""
        self._prompts: dict[int, Prompt] = {}
        self._ranges: dict[int, tuple[int, int]] = {}  # start and end of each answer, by its prompt's line
        self._end = 0

    @property
    def todo(self) -> list[Prompt]:
        return [prompt for line, prompt in self._prompts.items() if line not in self._ranges]

    @property
    def done(self) -> int:
        return len(self._ranges)

    def begin(self, prompts: Sequence[Prompt], model: str) -> None:
        """Load the answers of an earlier run, and cut off an incomplete last line.

        `model`: the fingerprint of the model.
        """
        self._model, self._prompts = model, {prompt.line: prompt for prompt in prompts}
        with storage_errors("read", self.path), open_regular(self.path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self._note(self._line_of(line, number), len(line))
                elif not line.startswith(BEGINNING[: len(line)]):
                    raise self._foreign(number)
        with storage_errors("write", self.path):
            if self.path.stat().st_size > self._end:
                os.truncate(self.path, self._end)

    def add(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> None:
        """Append all answers, or none if the write fails."""
        lines = [prompt.answer(samples, self._model) for prompt, samples in answers]
        with storage_errors("write", self.path):
            append(self.path, b"".join(lines))
        for (prompt, _), line in zip(answers, lines, strict=True):
            self._note(prompt.line, len(line))

    def finish(self) -> None:
        """Sort the answers into the order of the prompts."""
        if list(self._ranges) == sorted(self._ranges):
            return
        with open_regular(self.path) as old, atomic_file(self.path) as file:
            for _, (start, end) in sorted(self._ranges.items()):
                old.seek(start)
                file.write(old.read(end - start))

    def _note(self, number: int, size: int) -> None:
        self._ranges[number] = (self._end, self._end + size)
        self._end += size

    def _line_of(self, line: bytes, number: int) -> int:
        """Return the line number of the prompt that this answer is for."""
        result = None
        with suppress(ValueError):
            result = parse_json(line)
        if not isinstance(result, dict) or not isinstance(result.get("choices"), list):
            raise self._foreign(number)
        of = result.get("line")
        prompt, other = self._prompts.get(of) if type(of) is int else None, ""
        if result.get("model") != self._model:
            other = "is from another model, dtype or context"
        if prompt is None or result.get("request") != prompt.fingerprint:
            other = other or "is the answer to another prompt or to other settings"
        if other or prompt is None:
            hint = "repeat that command, or choose another --out"
            raise UsageError(f"{self.path}, line {number} {other}; {hint}")
        if prompt.line in self._ranges:
            raise DataError(f"{self.path}, line {number} repeats the answer to line {prompt.line}")
        return prompt.line

    def _foreign(self, number: int) -> DataError:
        return DataError(f"{self.path}, line {number} is not an answer to a prompt; choose another --out")


@contextmanager
def reserved(path: Path) -> Iterator[None]:
    """Create the output file if needed, and lock it for this process if the file system supports locks."""
    how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with storage_errors("write", path):
        descriptor = os.open(path, how, 0o666)
    try:
        if not locked(descriptor, path, lambda text: print_lines(f"distgpt: {text}", err=True)):
            raise UsageError(f"another process is writing {path}")
        yield
    finally:
        os.close(descriptor)


def distribute(comm: Comm, engine: Engine, requests: Sequence[Request], room: int) -> Iterator[list[Answer]]:
    """Compute rank 0's requests on all ranks. Rank 0 yields answers in the order they finish. Collective.

    Every rank must have its own engine and exhaust the iterator. It has at most `room` requests at a time.
    """
    collector, numbers, done = Collector(engine), dict[int, int](), list[Answer]()  # numbers by ticket
    left, missing = deque(enumerate(requests)), len(requests)
    while True:
        # Also request as many as were finished since the last report, so that a fast rank stays busy until
        # the next.
        reports, done = gather(comm, (done, max(0, room - len(numbers)) + len(done))), []
        shares: list[Share] | None = None
        if comm.rank == 0:
            answers = [answer for finished, _ in reports for answer in finished]
            if answers:
                yield answers
            missing -= len(answers)
            shares = _deal(left, [free for _, free in reports]) if missing else None
        shares = broadcast(comm, shares)
        if shares is None:
            return
        for number, request in shares[comm.rank]:
            numbers[collector.submit(request)] = number
        until = time.monotonic() + SYNC
        while not engine.is_idle and time.monotonic() < until and not (comm.size == 1 and done):
            done += [(numbers.pop(ticket), samples) for ticket, samples in collector.step()]


def _deal(left: deque[tuple[int, Request]], rooms: list[int]) -> list[Share]:
    """Deal the remaining requests to the ranks, one at a time, up to each rank's limit."""
    shares: list[Share] = [[] for _ in rooms]
    while left and any(len(share) < room for share, room in zip(shares, rooms, strict=True)):
        for share, room in zip(shares, rooms, strict=True):
            if left and len(share) < room:
                share.append(left.popleft())
    return shares

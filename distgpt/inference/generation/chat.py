"""A chat with a model: its turns, how they are answered, and which of them go when the context is full."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace

from distgpt.core.base.errors import UsageError
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.request import Request
from distgpt.corpora.chats.format import ChatFormat, Message

SHARE = 4  # of the context at most a part is left free for an answer


@dataclass(slots=True)
class Answer:
    """Tokens and seconds of the last answer. `reason` is an Event's, None where it was given up."""

    prompt: int  # tokens
    begun: float
    tokens: int = 0
    first: float = 0.0  # seconds until the first token
    seconds: float = 0.0
    reason: str | None = None

    def describe(self) -> str:
        rate = (self.tokens - 1) / max(self.seconds - self.first, 1e-9) if self.tokens > 1 else 0.0
        return (
            f"{self.prompt} + {self.tokens} tokens, {self.first:.3f} s to the first,"
            f" {rate:.1f} tokens/s from there on"
        )


class Conversation:
    """The turns of a user and a model. One thread calls it, and no other uses its engine.

    The engine has to have a single slot, which keeps what was computed of earlier turns.
    """

    def __init__(
        self, engine: Engine, chat: ChatFormat, settings: Request, context: int, system: str
    ) -> None:
        self._engine, self._chat, self._context = engine, chat, context
        stop = settings.stop + chat.stops
        self._settings = replace(settings, ends=chat.ends, stop=stop, overflow="stop", reuse=True)
        self.system, self.turns = system, list[Message]()
        self.answer = Answer(0, 0.0)
        self._ticket, self._count = -1, 0

    @property
    def messages(self) -> list[Message]:
        """All that the model is shown."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def reset(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    def ask(self, text: str) -> int:
        """Add a user's turn. Return how many old turns were forgotten, as the context is full.

        After an error, or an interrupt, everything is as before.
        """
        before, begun = list(self.turns), time.perf_counter()
        self.turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
            self._ticket = self._engine.submit(
                replace(self._settings, prompt=prompt, seed=(self._settings.seed + self._count) % (1 << 64))
            )
        except BaseException:
            self.turns = before
            raise
        self._count += 1
        self.answer = Answer(len(prompt), begun)
        return len(before) + 1 - len(self.turns)

    def pieces(self) -> Generator[str]:
        """Yield the answer piece by piece, empty ones too; closed early, the answer ends there."""
        text, answer = "", self.answer
        try:
            while not self._engine.is_idle:
                new = ""
                for event in self._engine.step():
                    answer.first = answer.first or time.perf_counter() - answer.begun
                    answer.tokens += event.token is not None
                    answer.reason, new = event.reason, new + event.text
                text += new
                yield new
        finally:
            self._engine.cancel(self._ticket)
            answer.seconds = time.perf_counter() - answer.begun
            if text or answer.reason:
                self.turns.append({"role": "assistant", "content": text})
            else:
                self.turns.pop()

    def _prompt(self) -> list[int]:
        """Return the tokens of all turns. Where they are too many the oldest go, until half of it is free."""
        room = self._context - min(self._settings.max_new_tokens, self._context // SHARE)
        prompt = self._chat.prompt(self.messages)
        while len(prompt) > room and len(self.turns) > 1:
            room = self._context // 2
            del self.turns[:2]
            prompt = self._chat.prompt(self.messages)
        if len(prompt) >= self._context:
            raise UsageError(
                f"the message makes a prompt of {len(prompt):,} tokens, the context has {self._context:,}:"
                " shorten it"
            )
        return prompt

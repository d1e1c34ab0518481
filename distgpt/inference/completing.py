"""Requests run to their end: each sample's text, tokens and what ended it, in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distgpt.inference.engine import Engine
from distgpt.inference.request import Event, Request
from distgpt.inference.sampling import Likelihood


@dataclass(slots=True)
class Completion:
    """One sample. `reason`: what ended it (see Event). `likelihoods`: of each token, if they were asked for.

    The tokens include those of a stop string, which the text lacks.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    likelihoods: list[Likelihood] | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        if event.token is not None:
            self.tokens.append(event.token)
        if event.likelihood is not None:
            if self.likelihoods is None:
                self.likelihoods = []
            self.likelihoods.append(event.likelihood)
        self.reason = event.reason

    def as_json(self) -> dict[str, Any]:
        """For a file: text, tokens, reason, and the log-probabilities if they were asked for."""
        shown: dict[str, Any] = {"text": self.text, "tokens": self.tokens, "reason": self.reason}
        if self.likelihoods is not None:
            shown["logprobs"] = [each.logprob for each in self.likelihoods]
            shown["alternatives"] = [each.alternatives for each in self.likelihoods]
        return shown

    @classmethod
    def of_json(cls, shown: dict[str, Any]) -> Completion:
        """What `as_json` returned, read again."""
        found = cls(shown["text"], shown["tokens"], shown["reason"])
        if "logprobs" in shown:
            alternatives = ([(i, p) for i, p in each] for each in shown["alternatives"])
            pairs = zip(shown["logprobs"], alternatives, strict=True)
            found.likelihoods = [Likelihood(*pair) for pair in pairs]
        return found


class Collector:
    """Events of many requests, put together to completions."""

    def __init__(self) -> None:
        self._open: dict[int, list[Completion]] = {}

    def expect(self, ticket: int, n: int) -> None:
        self._open[ticket] = [Completion() for _ in range(n)]

    def add(self, event: Event) -> list[Completion] | None:
        """Take an event in; return all samples of its request once they are done."""
        samples = self._open[event.ticket]
        samples[event.choice].add(event)
        if event.reason is None or any(each.reason is None for each in samples):
            return None
        return self._open.pop(event.ticket)


def complete(engine: Engine, requests: Iterable[Request]) -> list[list[Completion]]:
    """Run requests to their end on an idle engine; return the samples of each, in order."""
    collector, done = Collector(), {}
    tickets = [_submit(engine, collector, request) for request in requests]
    while not engine.is_idle:
        for event in engine.step():
            if samples := collector.add(event):
                done[event.ticket] = samples
    return [done[ticket] for ticket in tickets]


def _submit(engine: Engine, collector: Collector, request: Request) -> int:
    ticket = engine.submit(request)
    collector.expect(ticket, request.n)
    return ticket

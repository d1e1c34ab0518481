"""Requests run to their end: each sample's text, tokens and what ended it, in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distgpt.inference.engine import Engine
from distgpt.inference.request import Event, Request
from distgpt.inference.sampling import Likelihood, PromptLikelihoods


@dataclass(slots=True)
class Completion:
    """One sample. `reason`: what ended it (see Event). `likelihoods`: of each token, if they were asked for.

    The tokens include those of a stop string, which the text lacks. `prompt_likelihoods`: of each of the
    prompt's tokens, the first of which has none, if they were asked for.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    likelihoods: list[Likelihood] | None = None
    prompt_likelihoods: PromptLikelihoods | None = None

    def add(self, event: Event) -> None:
        self.text += event.text
        if event.token is not None:
            self.tokens.append(event.token)
        if event.likelihood is not None:
            if self.likelihoods is None:
                self.likelihoods = []
            self.likelihoods.append(event.likelihood)
        if event.prompt_likelihoods is not None:
            self.prompt_likelihoods = event.prompt_likelihoods
        self.reason = event.reason

    def as_json(self) -> dict[str, Any]:
        """For a file: text, tokens, reason, and the log-probabilities if they were asked for."""
        shown: dict[str, Any] = {"text": self.text, "tokens": self.tokens, "reason": self.reason}
        if self.likelihoods is not None:
            shown["logprobs"] = [each.logprob for each in self.likelihoods]
            shown["alternatives"] = [each.alternatives for each in self.likelihoods]
        if self.prompt_likelihoods is not None:
            shown["prompt_logprobs"] = [each and each.logprob for each in self.prompt_likelihoods]
            shown["prompt_alternatives"] = [each and each.alternatives for each in self.prompt_likelihoods]
        return shown

    @classmethod
    def of_json(cls, shown: dict[str, Any]) -> Completion:
        """What `as_json` returned, read again."""
        found = cls(shown["text"], shown["tokens"], shown["reason"])
        if "logprobs" in shown:
            pairs = zip(shown["logprobs"], shown["alternatives"], strict=True)
            found.likelihoods = [_likelihood(*pair) for pair in pairs]
        if "prompt_logprobs" in shown:
            pairs = zip(shown["prompt_logprobs"], shown["prompt_alternatives"], strict=True)
            found.prompt_likelihoods = [None if pair[0] is None else _likelihood(*pair) for pair in pairs]
        return found


def _likelihood(logprob: float, alternatives: list[list[Any]]) -> Likelihood:
    return Likelihood(logprob, [(i, p) for i, p in alternatives])


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

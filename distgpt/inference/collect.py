"""Requests run to their end: each sample's text, tokens and what ended it, in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distgpt.inference.engine import Engine
from distgpt.inference.request import Event, Likelihood, PromptLikelihoods, Request


@dataclass(slots=True)
class Completion:
    """One sample. Its tokens include those of a stop string, which the text lacks.

    `reason` and `prompt_likelihoods` are an Event's; `likelihoods` has one for each token, if wanted.
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
        """Text, tokens, reason, and the log-probabilities if they are wanted, for a file."""
        shown: dict[str, Any] = {"text": self.text, "tokens": self.tokens, "reason": self.reason}
        if self.likelihoods is not None:
            shown["logprobs"] = [each.logprob for each in self.likelihoods]
            shown["alternatives"] = [each.alternatives for each in self.likelihoods]
        if self.prompt_likelihoods is not None:
            shown["prompt_logprobs"] = [each and each.logprob for each in self.prompt_likelihoods]
            shown["prompt_alternatives"] = [each and each.alternatives for each in self.prompt_likelihoods]
        return shown


class Collector:
    """An engine whose events are put together to completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[int, list[Completion]] = {}

    def submit(self, request: Request) -> int:
        """Queue a request; return its ticket."""
        ticket = self.engine.submit(request)
        self._open[ticket] = [Completion() for _ in range(request.n)]
        return ticket

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Run the engine for a step; return the samples of each request that is done, with its ticket."""
        done = []
        for event in self.engine.step():
            samples = self._open[event.ticket]
            samples[event.choice].add(event)
            if event.reason is not None and all(each.reason is not None for each in samples):
                done.append((event.ticket, self._open.pop(event.ticket)))
        return done


def complete(engine: Engine, requests: Iterable[Request]) -> list[list[Completion]]:
    """Run requests to their end on an idle engine; return the samples of each, in order."""
    collector = Collector(engine)
    done: dict[int, list[Completion]] = {}
    tickets = [collector.submit(request) for request in requests]
    while not engine.is_idle:
        done.update(collector.step())
    return [done[ticket] for ticket in tickets]

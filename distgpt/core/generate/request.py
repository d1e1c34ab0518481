"""Requests to the engine, with each setting declared once; events and completions.

The options of `distgpt infer`, keys of prompt files, HTTP parameters and Python keywords are generated from
these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from distgpt.core.base.errors import UsageError, did_you_mean, escape
from distgpt.core.config.setting import Setting, setting

COLDEST = 1e-6  # lower temperatures are greedy, because dividing logits by them overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = setting(0.0, "Sampling temperature; 0: always the most likely token.", low=0)
    top_k: int = setting(0, "Sample from the k most likely tokens; 0: all.", low=0)
    top_p: float = setting(
        1.0, "Sample from the most likely tokens whose probabilities add up to p.", above=0, most=1
    )
    min_p: float = setting(
        0.0, "Drop tokens less than p times as likely as the most likely one.", low=0, most=1
    )
    repetition_penalty: float = setting(
        1.0,
        "Divide the logits of earlier tokens by this factor; 1: off.",
        low=0.01,  # logits multiplied or divided by these bounds stay finite
        most=100,
    )
    seed: int = setting(0, "Random seed.", low=0, most=(1 << 64) - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST


@dataclass(frozen=True, slots=True)
class Request(Sampling):
    """A prompt to continue, and how. Without a prompt, a template for `override`."""

    prompt: Sequence[int] = ()
    max_new_tokens: int = setting(100, "Maximum number of tokens to generate.", low=0)
    stop: tuple[str, ...] = field(
        default=(),
        metadata={"setting": Setting(str, "Stop before this text; may be repeated.")},
    )
    n: int = setting(1, "Samples per prompt.", low=1, most=1 << 16)
    logprobs: int | None = field(
        default=None,
        metadata={
            "setting": Setting(
                int,
                "Also print log-probabilities of the output and the N most likely tokens.",
                low=0,
            )
        },
    )
    prompt_logprobs: bool = setting(False, "With --logprobs: include the prompt's tokens.")
    overflow: str = setting(
        "slide",
        "If the context is full: slide (keep the newest tokens, recompute for every token), shift (drop"
        " the older half), or stop.",
        choices=("slide", "shift", "stop"),
    )
    lookup: int = setting(
        0,
        "Draft N tokens by prompt lookup and verify them in one pass: same text, faster if it repeats."
        " 0: off.",
        low=0,
        most=64,  # the logits of all drafted tokens are kept for every sample
    )

    # Not settings, because they depend on the tokenizer and the client.
    ends: tuple[int, ...] = ()  # tokens that end the text and are not in it
    reuse: bool = False  # reuse another prompt's tokens in a slot; bitwise identical if slots are exact

    def __post_init__(self) -> None:
        for name, about in REQUEST_SETTINGS.items():
            value = getattr(self, name)
            if name != "stop" and (name != "logprobs" or value is not None):
                about.check(name, value)
        if not isinstance(self.stop, tuple) or not all(isinstance(each, str) for each in self.stop):
            raise UsageError("stop must be a string or a list of strings")
        if not all(self.stop):
            raise UsageError("stop strings must not be empty")

    def override(self, prompt: Sequence[int], settings: Mapping[str, Any], *fixed: str) -> Request:
        """Return a request for a prompt with some settings changed, except the `fixed` ones."""
        known = [name for name in REQUEST_SETTINGS if name not in fixed]
        for name in settings:
            if name not in known:
                raise UsageError(f"unknown setting {escape(name)!r}{did_you_mean(name, known)}")
        stop = settings.get("stop", self.stop)
        if isinstance(stop, str):
            stop = (stop,)
        elif stop is None or isinstance(stop, list):
            stop = tuple(stop or ())
        return replace(self, **{**settings, "prompt": prompt, "stop": stop})


REQUEST_SETTINGS: dict[str, Setting] = {
    each.name: each.metadata["setting"] for each in fields(Request) if "setting" in each.metadata
}


class Likelihood(NamedTuple):
    """Log-probabilities (natural) of a token and of the most likely tokens."""

    logprob: float
    alternatives: list[tuple[int, float]]


PromptLikelihoods = list[Likelihood | None]  # one per prompt token; None for the first


class Event(NamedTuple):
    """A token of a sample. `choice` numbers the samples of a request from 0.

    `text` is the new text that later tokens cannot change; concatenated over all events, it is the sample's
    text. `reason` is set in the last event: "length" (max_new_tokens), "stop" (a stop string or end token,
    not in the text) or "context" (overflow `stop`). If no tokens are requested, one event without a token is
    sent. A sample's first event has `prompt_likelihoods` if requested.
    """

    ticket: int
    choice: int
    token: int | None
    likelihood: Likelihood | None
    text: str
    reason: str | None
    prompt_likelihoods: PromptLikelihoods | None = None


@dataclass(slots=True)
class Completion:
    """A sample. Its tokens include a stop string's, its text does not.

    For `reason` and `prompt_likelihoods`, see Event. `likelihoods` has one per token if requested.
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
        """Return text, tokens, reason, and log-probabilities if requested, for a file."""
        shown: dict[str, Any] = {"text": self.text, "tokens": self.tokens, "reason": self.reason}
        if self.likelihoods is not None:
            shown["logprobs"] = [each.logprob for each in self.likelihoods]
            shown["alternatives"] = [each.alternatives for each in self.likelihoods]
        if self.prompt_likelihoods is not None:
            shown["prompt_logprobs"] = [each and each.logprob for each in self.prompt_likelihoods]
            shown["prompt_alternatives"] = [each and each.alternatives for each in self.prompt_likelihoods]
        return shown

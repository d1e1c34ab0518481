"""What the engine is asked, and what it says while it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, NamedTuple

from distgpt.comm.agree import on_every_rank
from distgpt.comm.api import Comm
from distgpt.errors import UsageError, escape, nearest
from distgpt.inference.sampling import Likelihood, PromptLikelihoods, Sampling, refuse_other_types

MOST_SAMPLES = 1 << 16  # of one prompt
MOST_GUESSES = 64  # at once: scores of all of them are kept for every sample
Settings = dict[str, Any]  # of a request, by name
OVERFLOWS = ("slide", "shift", "stop")
SAMPLING = tuple(each.name for each in fields(Sampling))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue, `n` times.

    `logprobs`: with how many alternatives each token's log-probability is wanted; None: it is not.
    `prompt_logprobs`: those of the prompt's own tokens too.
    `lookup`: how many tokens to guess from what followed the same few tokens before; 0: none.
    `overflow`: past the context, `slide` sees all of the last tokens that fit, and computes them anew for
    every token; `shift` drops the older half, and computes the rest anew once, but where positions may move
    (RoPE, or none): there keys and values of the rest stay, and carry what they saw; `stop` ends.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 100
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: bool = False
    lookup: int = 0
    overflow: str = "slide"

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise UsageError("the prompt is empty: give at least one token to start from")
        asked = ("logprobs",) if self.logprobs is not None else ()
        refuse_other_types(self, Integral, ("max_new_tokens", "n", "lookup", *asked))
        for name, least in (("max_new_tokens", 0), ("n", 1), ("logprobs", 0), ("lookup", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}: it must be at least {least}")
        for name, most in (("n", MOST_SAMPLES), ("lookup", MOST_GUESSES)):
            if (value := getattr(self, name)) > most:
                raise UsageError(f"{name} is {value}: it must be at most {most}")
        if self.prompt_logprobs and self.logprobs is None:
            raise UsageError("prompt_logprobs needs logprobs: how many alternatives, or 0")
        if not all(isinstance(each, str) for each in self.stop):
            raise UsageError("stop must be a text or a list of texts")
        if not all(self.stop):
            raise UsageError("a stop string is empty")
        if self.overflow not in OVERFLOWS:
            raise UsageError(f"overflow is {self.overflow!r}: it must be one of {', '.join(OVERFLOWS)}")


SETTINGS = (*SAMPLING, *(each.name for each in fields(Request) if each.name not in ("prompt", "sampling")))


class Event(NamedTuple):
    """A token of a sample. `choice` counts the samples of a request, from 0.

    `text` is what has become certain with this token; all of them together are the sample's text. `reason`
    comes with the last event: "length" (max_new_tokens), "stop" (a stop string, which the text lacks) or
    "context" (overflow `stop`). An event without a token comes where none was asked for.
    `prompt_likelihoods`: of each of the prompt's tokens, the first of which has none; in a sample's first
    event, if they are wanted.
    """

    ticket: int
    choice: int
    token: int | None
    likelihood: Likelihood | None
    text: str
    reason: str | None
    prompt_likelihoods: PromptLikelihoods | None = None


def request_of(prompt: Sequence[int], **settings: Any) -> Request:
    """A request from settings by name, those of Sampling and those of Request in one."""
    for name in settings:
        if name not in SETTINGS:
            raise UsageError(f"the setting {escape(name)!r} is unknown{nearest(name, SETTINGS)}")
    stop = settings.get("stop")
    settings["stop"] = tuple(stop) if isinstance(stop, list | tuple) else () if stop is None else (stop,)
    chosen = {name: settings.pop(name) for name in SAMPLING if name in settings}
    return Request(prompt, sampling=Sampling(**chosen), **settings)


def refuse_senseless(settings: Settings, comm: Comm) -> None:
    """A UsageError for what flags say, before anything is read. Collective."""
    on_every_rank(comm, lambda: request_of([0], **settings))

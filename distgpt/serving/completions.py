"""OpenAI's completions: from the body of a request to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distgpt.checked import parse_json
from distgpt.config import nearest
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.inference.request import OVERFLOWS, Request, request_of
from distgpt.inference.text import opening
from distgpt.serving.limits import Limits, Refusal, invalid

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of each

# OpenAI's parameters that mean nothing here, and the values that ask for nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
_IGNORED = ("user", "metadata")  # which say nothing of the answer


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind the server, as far as requests need to know it."""

    name: str
    tokenizer: Tokenizer
    vocab: int
    context: int
    created: int  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Asked:
    """A body that makes sense: a request for each prompt, and how the answer is to look."""

    requests: list[Request]
    stream: bool
    echo: bool
    with_usage: bool  # at the end of a stream

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


def asked(body: bytes, served: Served, limits: Limits) -> Asked:
    """Parse a request for completions. A Refusal says what is wrong with it."""
    try:
        found = parse_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON as it should be: {error}") from None
    if not isinstance(found, dict):
        raise invalid("the body is not a JSON object")
    given = _Given(found)
    _refuse_unknown(given)
    if (model := given.text("model", served.name)) != served.name:
        raise Refusal(404, f"the model {model!r:.200} does not exist", param="model", code="model_not_found")
    stream, echo = given.switch("stream"), given.switch("echo")
    settings = _settings(given, limits)
    if served.tokenizer.separator is not None and not given.switch("ignore_eos"):
        settings["stop"] += (served.tokenizer.decode([served.tokenizer.separator]),)
    settings["prompt_logprobs"] = echo and settings["logprobs"] is not None
    options = given.value("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    prompts = _prompts(given.value("prompt", None), served, limits, settings["n"])
    tokens = len(prompts) * settings["max_new_tokens"] + settings["prompt_logprobs"] * sum(map(len, prompts))
    most = tokens * settings["n"] * (1 + (settings["logprobs"] or 0))
    if most > limits.values:
        raise invalid(f"the answer may have {most:,} tokens and logprobs, more than {limits.values:,}")
    _refuse_long(prompts, served, limits, settings)
    try:
        requests = [request_of(prompt, **dict(settings)) for prompt in prompts]
    except UsageError as error:
        raise invalid(str(error)) from None
    return Asked(requests, stream, echo, bool(options.get("include_usage")))


class _Given:
    """The parameters of a body, which are as good as absent where they are null."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found, self.names = found, set[str]()

    def value(self, name: str, default: Any) -> Any:
        self.names.add(name)
        value = self.found.get(name)
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.value(name, default)
        if not isinstance(value, str):
            raise invalid(f"{name} must be a text", name)
        return value

    def switch(self, name: str) -> bool:
        value = self.value(name, False)
        if not isinstance(value, bool):
            raise invalid(f"{name} must be true or false", name)
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> Any:
        value = self.value(name, default)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise invalid(f"{name} must be an integer from {least:,} to {most:,}", name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.value(name, default)
        if type(value) not in (int, float):
            raise invalid(f"{name} must be a number", name)
        return float(value)


PARAMETERS = (
    *("model", "prompt", "stream", "stream_options", "echo", "n", "max_tokens", "logprobs", "seed", "stop"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "overflow", "ignore_eos"),
)


def _refuse_unknown(given: _Given) -> None:
    """What would be silently passed over otherwise."""
    known = (*PARAMETERS, *_WITHOUT_EFFECT, *_IGNORED)
    for name, value in given.found.items():
        if name not in known:
            hint = nearest(name[:50], known)
            raise invalid(f"unrecognized request argument: {name!r:.60}{hint}", name[:50])
        if name in _WITHOUT_EFFECT and value not in _WITHOUT_EFFECT[name]:
            raise invalid(f"{name} is not supported", name)


def _settings(given: _Given, limits: Limits) -> dict[str, Any]:
    """Those of a request of the engine, with OpenAI's names and defaults."""
    overflow = given.text("overflow", "stop")
    if overflow not in OVERFLOWS:
        raise invalid(f"overflow must be one of {', '.join(OVERFLOWS)}", "overflow")
    seed = given.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    return {
        "max_new_tokens": given.integer("max_tokens", 16, 0, limits.max_tokens),
        "n": given.integer("n", 1, 1, limits.samples),
        "logprobs": given.integer("logprobs", None, 0, MOST_LOGPROBS),
        "seed": secrets.randbits(63) if seed is None else seed % (1 << 64),
        "stop": _stops(given.value("stop", ())),
        "overflow": overflow,
        "temperature": given.number("temperature", 1.0),
        "top_p": given.number("top_p", 1.0),
        "top_k": given.integer("top_k", 0, 0, 1 << 31),
        "min_p": given.number("min_p", 0.0),
        "repetition_penalty": given.number("repetition_penalty", 1.0),
    }


def _stops(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise invalid("stop must be a text, or a list of texts", "stop")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise invalid(f"stop may have up to {MOST_STOPS} texts of up to {LONGEST_STOP} characters", "stop")
    return tuple(text for text in texts if text)


def _prompts(value: Any, served: Served, limits: Limits, n: int) -> list[list[int]]:
    """Tokens of each prompt: of a text, a list of texts, tokens, a list of lists of tokens, or nothing."""
    if value is None:
        return [opening(served.tokenizer)]
    several = isinstance(value, list) and bool(value) and type(value[0]) in (str, list)
    prompts = value if several else [value]
    if len(prompts) * n > limits.samples:
        raise invalid(
            f"{len(prompts) * n:,} samples are more than {limits.samples:,}", "n" if n > 1 else "prompt"
        )
    kind: Callable[[Any, Served], list[int]] = _text if isinstance(prompts[0], str) else _tokens
    return [kind(prompt, served) for prompt in prompts]


def _text(prompt: Any, served: Served) -> list[int]:
    if not isinstance(prompt, str):
        raise invalid("prompt mixes texts with tokens", "prompt")
    try:
        ids: list[int] = served.tokenizer.encode(prompt).tolist()
    except DataError as error:
        raise invalid(str(error), "prompt") from None
    return ids


def _tokens(prompt: Any, served: Served) -> list[int]:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid("prompt must be a text, a list of texts, tokens, or a list of such", "prompt")
    if not all(0 <= token < served.vocab for token in prompt):
        raise invalid(f"tokens of the prompt must lie in [0, {served.vocab:,})", "prompt")
    return prompt


def _refuse_long(
    prompts: Sequence[list[int]], served: Served, limits: Limits, settings: dict[str, Any]
) -> None:
    longest = max(map(len, prompts))
    said = f"this model's context is {served.context:,} tokens, the prompt has {longest:,}: shorten it"
    if longest > served.context and settings["prompt_logprobs"]:
        raise _too_long(f"{said}, or leave out logprobs or echo")
    if longest > served.context and settings["overflow"] == "stop":
        raise _too_long(f'{said}, or send "overflow": "shift", which drops its beginning')
    if longest > limits.prompt_tokens:
        raise _too_long(f"the prompt has {longest:,} tokens, more than {limits.prompt_tokens:,}")


def _too_long(text: str) -> Refusal:
    return invalid(text, "prompt", "context_length_exceeded")

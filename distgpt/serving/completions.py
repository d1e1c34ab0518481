"""OpenAI's completions: from the body of a request to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgpt.checked import parse_json
from distgpt.config import Setting, nearest
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.inference.request import REQUEST_SETTINGS, Request
from distgpt.inference.sample import default_prompt
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
DEFAULTS = Request(max_new_tokens=16, temperature=1.0, overflow="stop")  # OpenAI's
# Parameters that are settings of a request, and their names there.
SETTINGS = {
    "max_tokens": "max_new_tokens",
    **{
        name: name for name in REQUEST_SETTINGS if name not in ("max_new_tokens", "prompt_logprobs", "lookup")
    },
}
PARAMETERS = ("model", "prompt", "stream", "stream_options", "echo", "ignore_eos", *SETTINGS)


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
    _refuse_unknown(found)
    switch, text = Setting(bool, ""), Setting(str, "")
    if (model := _checked(found, "model", text, served.name)) != served.name:
        raise Refusal(404, f"the model {model!r:.200} does not exist", param="model", code="model_not_found")
    stream, echo = (_checked(found, name, switch, False) for name in ("stream", "echo"))
    settings, separator = _settings(found, limits), served.tokenizer.separator
    if separator is not None and not _checked(found, "ignore_eos", switch, False):
        settings = replace(settings, stop=(*settings.stop, served.tokenizer.decode([separator])))
    settings = replace(settings, prompt_logprobs=echo and settings.logprobs is not None)
    options = found.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    prompts = _prompts(found.get("prompt"), served, limits, settings.n)
    tokens = len(prompts) * settings.max_new_tokens + settings.prompt_logprobs * sum(map(len, prompts))
    most = tokens * settings.n * (1 + (settings.logprobs or 0))
    if most > limits.values:
        raise invalid(f"the answer may have {most:,} tokens and logprobs, more than {limits.values:,}")
    _refuse_long(prompts, served, limits, settings)
    requests = [replace(settings, prompt=prompt) for prompt in prompts]
    return Asked(requests, stream, echo, bool(options.get("include_usage")))


def _settings(given: dict[str, Any], limits: Limits) -> Request:
    """The settings of a request, without its prompt."""
    most = {"max_tokens": limits.max_tokens, "n": limits.samples, "logprobs": MOST_LOGPROBS}
    found: dict[str, Any] = {"seed": secrets.randbits(63)}
    for name, setting in SETTINGS.items():
        about = REQUEST_SETTINGS[setting]
        if name == "stop":
            found[name] = _stops(given.get(name))
        elif name == "seed":
            value = _checked(given, name, replace(about, low=-(1 << 63)), found[name])
            found[name] = value % (1 << 64)
        else:
            about = replace(about, most=most.get(name, about.most))
            found[setting] = _checked(given, name, about, getattr(DEFAULTS, setting))
    return DEFAULTS.override((), found)


def _checked(given: dict[str, Any], name: str, about: Setting, default: Any) -> Any:
    """A parameter's value, which is as good as absent where it is null."""
    if (value := given.get(name)) is None:
        return default
    try:
        about.check(name, value)
    except UsageError as error:
        raise invalid(str(error), name) from None
    return value


def _refuse_unknown(given: dict[str, Any]) -> None:
    """Refuse what would be silently passed over otherwise."""
    known = (*PARAMETERS, *_WITHOUT_EFFECT, *_IGNORED)
    for name, value in given.items():
        if name not in known:
            hint = nearest(name[:50], known)
            raise invalid(f"unrecognized request argument: {name!r:.60}{hint}", name[:50])
        if name in _WITHOUT_EFFECT and value not in _WITHOUT_EFFECT[name]:
            raise invalid(f"{name} is not supported", name)


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid("stop must be a text, or a list of texts", "stop")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise invalid(f"stop may have up to {MOST_STOPS} texts of up to {LONGEST_STOP} characters", "stop")
    return [text for text in texts if text]


def _prompts(value: Any, served: Served, limits: Limits, n: int) -> list[list[int]]:
    """Tokens of each prompt: of a text, a list of texts, tokens, a list of lists of tokens, or nothing."""
    if value is None:
        return [default_prompt(served.tokenizer)]
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


def _refuse_long(prompts: Sequence[list[int]], served: Served, limits: Limits, settings: Request) -> None:
    longest = max(map(len, prompts))
    said = f"this model's context is {served.context:,} tokens, the prompt has {longest:,}: shorten it"
    if not all(map(len, prompts)):
        raise invalid("the prompt is empty: give at least one token to start from", "prompt")
    if longest > served.context and settings.prompt_logprobs:
        raise _too_long(f"{said}, or leave out logprobs or echo")
    if longest > served.context and settings.overflow == "stop":
        raise _too_long(f'{said}, or send "overflow": "shift", which drops its beginning')
    if longest > limits.prompt_tokens:
        raise _too_long(f"the prompt has {longest:,} tokens, more than {limits.prompt_tokens:,}")


def _too_long(text: str) -> Refusal:
    return invalid(text, "prompt", "context_length_exceeded")

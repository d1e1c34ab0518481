"""OpenAI's completions: from a body to requests of the engine, and from its events to an answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distgpt.checked import parse_json
from distgpt.config import Setting, nearest
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.data.tokenizers.plain import BytesDecoder
from distgpt.errors import DataError, UsageError
from distgpt.inference.request import REQUEST_SETTINGS, Event, Likelihood, Request
from distgpt.inference.sample import default_prompt
from distgpt.serving.limits import Limits, Refusal, invalid

DONE = b"data: [DONE]\n\n"
_REASONS = {"context": "length"}  # what OpenAI has no word for
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
class ParsedBody:
    """A body that makes sense: a request for each prompt, and how the answer is to look."""

    requests: list[Request]
    stream: bool
    echo: bool
    with_usage: bool  # at the end of a stream

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


def parse_body(body: bytes, served: Served, limits: Limits) -> ParsedBody:
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
    return ParsedBody(requests, stream, echo, bool(options.get("include_usage")))


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
        return served.tokenizer.encode_prompt(prompt)
    except DataError as error:
        raise invalid(str(error), "prompt") from None


def _tokens(prompt: Any, served: Served) -> list[int]:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid("prompt must be a text, a list of texts, tokens, or a list of such", "prompt")
    if not all(0 <= token < served.vocab for token in prompt):
        raise invalid(f"tokens of the prompt must lie in [0, {served.vocab:,})", "prompt")
    return prompt


def _refuse_long(prompts: Sequence[list[int]], served: Served, limits: Limits, settings: Request) -> None:
    longest = max(map(len, prompts))
    problem = f"this model's context is {served.context:,} tokens, the prompt has {longest:,}: shorten it"
    if not all(map(len, prompts)):
        raise invalid("the prompt is empty: give at least one token to start from", "prompt")
    if longest > served.context and settings.prompt_logprobs:
        raise _too_long(f"{problem}, or leave out logprobs or echo")
    if longest > served.context and settings.overflow == "stop":
        raise _too_long(f'{problem}, or send "overflow": "shift", which drops its beginning')
    if longest > limits.prompt_tokens:
        raise _too_long(f"the prompt has {longest:,} tokens, more than {limits.prompt_tokens:,}")


def _too_long(text: str) -> Refusal:
    return invalid(text, "prompt", "context_length_exceeded")


class Answer:
    """The choices of a call, prompt by prompt, sample by sample."""

    def __init__(self, parsed: ParsedBody, served: Served) -> None:
        self._parsed, self._served = parsed, served
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self._choices = [
            _Choice(request, served.tokenizer, parsed.echo)
            for request in parsed.requests
            for _ in range(request.n)
        ]
        self.tokens = 0  # generated

    def add(self, index: int, event: Event) -> bytes:
        """Take in an event of the request `index`; return what a stream says of it, which may be nothing."""
        number = index * self._parsed.requests[index].n + event.choice
        self.tokens += event.token is not None
        choice = self._choices[number]
        new = choice.add(event)
        if not (new["text"] or new["logprobs"] or new["finish_reason"]):
            return b""
        more = {"usage": None} if self._parsed.with_usage else {}
        return _sent({**self._head, "choices": [{"index": number, **new}], **more})

    def whole(self) -> dict[str, Any]:
        """The body, once the last event is there."""
        choices = [{"index": number, **choice.whole()} for number, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def end(self) -> bytes:
        """The last of a stream."""
        if not self._parsed.with_usage:
            return DONE
        return _sent({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, int]:
        prompt = self._parsed.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
        }


class _Choice:
    """One sample. `text_offset` counts from the beginning of its text, before stop strings are cut off.

    With `echo` that is the prompt's.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, echo: bool) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._text = tokenizer.decode(request.prompt) if echo else ""
        self._unsent = self._text
        self._reason: str | None = None
        self._offset, self._streamer = 0, tokenizer.streamer()
        self._likelihoods: dict[str, list[Any]] | None = None
        if request.logprobs is not None:
            self._likelihoods = _no_likelihoods()
            if not echo:
                for token in request.prompt:
                    self._streamer.feed(token)

    def add(self, event: Event) -> dict[str, Any]:
        """Take in an event; return what is new."""
        self._text += event.text
        text, self._unsent = self._unsent + event.text, ""
        self._reason = event.reason and _REASONS.get(event.reason, event.reason)
        return {"text": text, "logprobs": self._likelihood(event), "finish_reason": self._reason}

    def whole(self) -> dict[str, Any]:
        return {"text": self._text, "logprobs": self._likelihoods, "finish_reason": self._reason}

    def _likelihood(self, event: Event) -> dict[str, list[Any]] | None:
        """Return the log-probabilities of the event's token, and of the prompt's if it brings them."""
        if self._likelihoods is None:
            return None
        found = _no_likelihoods()
        if event.prompt_likelihoods is not None:
            for token, likelihood in zip(self._request.prompt, event.prompt_likelihoods, strict=True):
                self._note(found, token, likelihood)
        if event.token is not None:
            self._note(found, event.token, event.likelihood)
        for name, values in found.items():
            self._likelihoods[name] += values
        return found if found["tokens"] else None

    def _note(self, found: dict[str, list[Any]], token: int, likelihood: Likelihood | None) -> None:
        text, top = self._tokenizer, None
        if likelihood is not None:
            pairs = [*likelihood.alternatives, (token, likelihood.logprob)]
            top = {token_text(text, token): logprob for token, logprob in pairs}
        found["tokens"].append(token_text(text, token))
        found["token_logprobs"].append(None if likelihood is None else likelihood.logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(self._offset)
        self._offset += len(self._streamer.feed(token))


def _no_likelihoods() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone. One that is no whole character as OpenAI writes it: bytes:\\xe2\\x80."""
    if isinstance(tokenizer, BytesDecoder) and token < len(tokenizer.pieces):
        piece = tokenizer.pieces[token]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    return tokenizer.decode([token])


def failed(why: Refusal) -> bytes:
    """The end of a stream that fails."""
    return _sent(why.as_json())


def _sent(what: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(what)}\n\n".encode()

"""OpenAI's completions: from a body to requests of the engine, and from its events to an answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import Setting, nearest
from distgpt.core.data.tokenizers import BytesDecoder, Streamer, Tokenizer
from distgpt.core.generate.request import REQUEST_SETTINGS, Event, Likelihood, Request
from distgpt.core.generate.sample import default_prompt
from distgpt.corpora.chats.format import ChatFormat
from distgpt.inference.serving.limits import Limits, Refusal, invalid

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
ECHOED = 4  # characters of an echo that count as one token of the answer
HEAVY = 512  # bytes of a token, beyond which it counts as several
AT_ONCE = 256  # elements of a list that become JSON
_IGNORED = ("user", "metadata")  # which say nothing of the answer
DEFAULTS = Request(max_new_tokens=16, temperature=1.0, overflow="stop")  # OpenAI's
# Parameters that are settings of a request, and their names there.
SETTINGS = {
    "max_tokens": "max_new_tokens",
    **{
        name: name for name in REQUEST_SETTINGS if name not in ("max_new_tokens", "prompt_logprobs", "lookup")
    },
}
SWITCH = Setting(bool, "")
PARAMETERS = ("model", "prompt", "stream", "stream_options", "echo", "ignore_eos", *SETTINGS)


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind the server, as far as requests need to know it."""

    name: str
    tokenizer: Tokenizer
    vocab: int
    context: int
    created: int  # seconds since 1970
    chat: ChatFormat | DataError | None = None  # or why there is none
    reuse: bool = False  # whether completions, too, begin with what lanes hold of their prompts
    weight: int = 1  # tokens that each counts as in the size of an answer
    is_tuned: bool = False  # on chats

    @property
    def chats(self) -> bool:
        """Tell whether the model seems to know chats."""
        return isinstance(self.chat, ChatFormat) and (self.is_tuned or self.chat.is_taught)


class Beginning(NamedTuple):
    """The beginning of all samples of a prompt: the text that they show, and a decoder that knows it."""

    text: str
    streamer: Streamer


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that makes sense: a request for each prompt, and how the answer is to look."""

    served: Served
    requests: list[Request]
    beginnings: list[Beginning]  # of each request
    stream: bool
    with_usage: bool  # at the end of a stream
    choice: type[Choice]  # what a sample becomes
    size: int  # tokens and log-probabilities of prompts and answer at most, which take memory

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


def parse_body(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for completions. A Refusal says what is wrong with it."""
    found = parse_object(body, (*PARAMETERS, *_IGNORED), _WITHOUT_EFFECT)
    refuse_other_model(found, served)
    stream, echo = (checked(found, name, SWITCH, False) for name in ("stream", "echo"))
    settings = parse_settings(found, limits, SETTINGS)
    ends = () if checked(found, "ignore_eos", SWITCH, False) else served.tokenizer.ends
    scored = echo and settings.logprobs is not None
    settings = replace(settings, ends=ends, prompt_logprobs=scored)
    settings = replace(settings, reuse=served.reuse)
    with_usage = wants_usage(found)
    prompts = _prompts(found.get("prompt"), served, limits, settings.n)
    tokens = len(prompts) * settings.max_new_tokens + settings.prompt_logprobs * sum(map(len, prompts))
    texts = settings.n * sum(map(served.tokenizer.text_size, prompts)) if echo else 0
    size = sum(map(len, prompts)) + refuse_large(tokens, settings, served, limits, -(-texts // ECHOED))
    refuse_long(prompts, served, limits, settings)
    requests = [replace(settings, prompt=prompt) for prompt in prompts]
    beginnings = [beginning(request, served.tokenizer, echo) for request in requests]
    return ParsedBody(served, requests, beginnings, stream, with_usage, Choice, size)


def weight_of(tokenizer: Tokenizer) -> int:
    """Return as how many tokens each counts, for the longest: vocabularies of others may hold megabytes."""
    return max(1, max(tokenizer.text_size([token]) for token in range(tokenizer.size)) // HEAVY)


def beginning(request: Request, tokenizer: Tokenizer, echo: bool = False) -> Beginning:
    """Decode a prompt as far as its answer needs it."""
    if echo:
        return Beginning(tokenizer.decode(request.prompt), tokenizer.streamer())
    return Beginning("", tokenizer.streamer_behind(request.prompt if request.logprobs is not None else ()))


def parse_object(
    body: bytes, known: Sequence[str], without_effect: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the object of a body with known parameters alone.

    Refuses what would be silently passed over otherwise.
    """
    try:
        found = parse_json(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON as it should be: {error}") from None
    if not isinstance(found, dict):
        raise invalid("the body is not a JSON object")
    for name, value in found.items():
        if name not in known and name not in without_effect:
            hint = nearest(name[:50], (*known, *without_effect))
            raise invalid(f"unrecognized request argument: {name!r:.60}{hint}", name[:50])
        if value not in without_effect.get(name, (value,)):
            raise invalid(f"{name} is not supported", name)
    return found


def refuse_other_model(found: dict[str, Any], served: Served) -> None:
    """Reject a request that names a model that is not served."""
    if (name := checked(found, "model", Setting(str, ""), served.name)) != served.name:
        text = f"the model {name!r:.200} does not exist: here is {served.name!r:.200}"
        raise Refusal(404, text, param="model", code="model_not_found")


def wants_usage(found: dict[str, Any]) -> bool:
    """Tell whether a stream is to end with the count of its tokens."""
    options = found.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    return bool(options.get("include_usage"))


def refuse_large(tokens: int, settings: Request, served: Served, limits: Limits, echoed: int = 0) -> int:
    """Return the size that an answer may have, with `tokens` for each of its samples, and an echo of all."""
    most = tokens * settings.n * (1 + (settings.logprobs or 0)) * served.weight + echoed
    if most > limits.values:
        echo = f" ({ECHOED} characters of the echo are one)" if echoed else ""
        long = (
            f" (one counts as {served.weight}: the vocabulary is of long texts)" if served.weight > 1 else ""
        )
        raise invalid(
            f"the answer may have {most:,} tokens and logprobs{echo}{long}, more than {limits.values:,}"
        )
    return most


def parse_settings(given: dict[str, Any], limits: Limits, names: Mapping[str, str]) -> Request:
    """Return a request without its prompt; `names` are those of its settings, by the parameters'."""
    most = {"max_tokens": limits.max_tokens, "n": limits.samples, "logprobs": MOST_LOGPROBS}
    found: dict[str, Any] = {"seed": secrets.randbits(63)}
    for name, setting in names.items():
        about = REQUEST_SETTINGS[setting]
        if name == "stop":
            found[name] = _stops(given.get(name))
        elif name == "seed":
            value = checked(given, name, replace(about, low=-(1 << 63)), found[name])
            found[name] = value % (1 << 64)
        else:
            about = replace(about, most=most.get(name, about.most))
            found[setting] = checked(given, name, about, getattr(DEFAULTS, setting))
    return DEFAULTS.override((), found)


def checked(given: dict[str, Any], name: str, about: Setting, default: Any) -> Any:
    """A parameter's value, which is as good as absent where it is null."""
    if (value := given.get(name)) is None:
        return default
    try:
        about.check(name, value)
    except UsageError as error:
        raise invalid(str(error), name) from None
    return value


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
    kind: Callable[[Any, Served], list[int]] = _text if isinstance(prompts[0], str) else tokens_of
    return [kind(prompt, served) for prompt in prompts]


def _text(prompt: Any, served: Served) -> list[int]:
    if not isinstance(prompt, str):
        raise invalid("prompt mixes texts with tokens", "prompt")
    try:
        return served.tokenizer.encode_prompt(prompt)
    except DataError as error:
        raise invalid(str(error), "prompt") from None


def tokens_of(prompt: Any, served: Served, name: str = "prompt") -> list[int]:
    """Return a list of tokens that the model has."""
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        of_texts = "a text, a list of texts, tokens, or a list of such" if name == "prompt" else "tokens"
        raise invalid(f"{name} must be {of_texts}", name)
    if not all(0 <= token < served.vocab for token in prompt):
        raise invalid(f"{name}: tokens must lie in [0, {served.vocab:,})", name)
    return prompt


def refuse_long(
    prompts: Sequence[list[int]], served: Served, limits: Limits, settings: Request, param: str = "prompt"
) -> None:
    longest = max(map(len, prompts))
    problem = f"this model's context is {served.context:,} tokens, the prompt has {longest:,}: shorten it"
    if not all(map(len, prompts)):
        raise invalid("the prompt is empty: give at least one token to start from", param)
    if longest > served.context and settings.prompt_logprobs:
        raise _too_long(f"{problem}, or leave out logprobs or echo", param)
    if longest > served.context and settings.overflow == "stop":
        raise _too_long(f'{problem}, or send "overflow": "shift", which drops its beginning', param)
    if longest > limits.prompt_tokens:
        raise _too_long(f"the prompt has {longest:,} tokens, more than {limits.prompt_tokens:,}", param)


def _too_long(text: str, param: str) -> Refusal:
    return invalid(text, param, "context_length_exceeded")


class Answer:
    """The choices of a call, prompt by prompt, sample by sample."""

    def __init__(self, parsed: ParsedBody) -> None:
        self._parsed, served, kind = parsed, parsed.served, parsed.choice
        self._head = {
            "id": f"{kind.prefix}-{secrets.token_hex(12)}",
            "object": kind.part if parsed.stream else kind.kind,
            "created": int(time.time()),
            "model": served.name,
        }
        self._choices = [
            kind(request, served.tokenizer, begins)
            for request, begins in zip(parsed.requests, parsed.beginnings, strict=True)
            for _ in range(request.n)
        ]
        self.tokens = 0  # generated

    def add(self, index: int, event: Event) -> bytes:
        """Take in an event of the request `index`; return what a stream says of it, which may be nothing."""
        number = index * self._parsed.requests[index].n + event.choice
        self.tokens += event.token is not None
        if (new := self._choices[number].add(event)) is None:
            return b""
        more = {"usage": None} if self._parsed.with_usage else {}
        said = {**self._head, "choices": [{"index": number, **new}], **more}
        return _sent(said, is_long=event.prompt_likelihoods is not None)

    def body(self) -> bytes:
        """The whole answer, once the last event is there."""
        choices = [{"index": number, **choice.whole()} for number, choice in enumerate(self._choices)]
        return "".join(json_of({**self._head, "choices": choices, "usage": self._usage()})).encode()

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


class Choice:
    """One sample. `text_offset` counts from the beginning of its text, before stop strings are cut off.

    With `echo` that is the prompt's.
    """

    prefix, kind, part = (
        "cmpl",
        "text_completion",
        "text_completion",
    )  # of ids; what an answer and a piece are

    def __init__(self, request: Request, tokenizer: Tokenizer, begins: Beginning) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._texts = [begins.text]
        self._unsent = begins.text
        self._reason: str | None = None
        self._offset, self._streamer = 0, begins.streamer.copy()
        self._likelihoods: dict[str, list[Any]] | None = None
        if request.logprobs is not None:
            self._likelihoods = self._no_likelihoods()

    def add(self, event: Event) -> dict[str, Any] | None:
        """Take in an event; return what is new, if anything is."""
        self._texts.append(event.text)
        text, self._unsent = self._unsent + event.text, ""
        self._reason = event.reason and _REASONS.get(event.reason, event.reason)
        likelihood = self._likelihood(event)
        if not (text or likelihood or self._reason):
            return None
        return self._shown(text, likelihood)

    def whole(self) -> dict[str, Any]:
        return self._shown("".join(self._texts), self._likelihoods)

    def _shown(self, text: str, likelihoods: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": likelihoods, "finish_reason": self._reason}

    def _no_likelihoods(self) -> dict[str, list[Any]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _likelihood(self, event: Event) -> dict[str, list[Any]] | None:
        """Return the log-probabilities of the event's token, and of the prompt's if it brings them."""
        if self._likelihoods is None:
            return None
        found = self._no_likelihoods()
        if event.prompt_likelihoods is not None:
            for token, likelihood in zip(self._request.prompt, event.prompt_likelihoods, strict=True):
                self._note(found, token, likelihood)
        if event.token is not None:
            self._note(found, event.token, event.likelihood)
        for name, values in found.items():
            self._likelihoods[name] += values
        return found if any(found.values()) else None

    def _note(self, found: dict[str, list[Any]], token: int, likelihood: Likelihood | None) -> None:
        text, top = self._tokenizer, None
        if likelihood is not None:
            pairs = [*likelihood.alternatives, (token, likelihood.logprob)]
            top = {token_text(text, token)[0]: logprob for token, logprob in pairs}
        found["tokens"].append(token_text(text, token)[0])
        found["token_logprobs"].append(None if likelihood is None else likelihood.logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(self._offset)
        self._offset += len(self._streamer.feed(token))


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return a token's text and bytes. If they are not whole characters, OpenAI writes bytes:\\xe2\\x80."""
    if isinstance(tokenizer, BytesDecoder) and token < len(tokenizer.pieces):
        piece = tokenizer.pieces[token]
        try:
            return piece.decode(), piece
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece), piece
    text = tokenizer.decode([token])
    return text, text.encode(errors="replace")


def failed(why: Refusal) -> bytes:
    """The end of a stream that fails."""
    return _sent(why.as_json())


def _sent(what: dict[str, Any], is_long: bool = False) -> bytes:
    text = "".join(json_of(what)) if is_long else json.dumps(what)
    return f"data: {text}\n\n".encode()


def json_of(value: Any) -> Iterator[str]:
    """Return what json.dumps gives, in pieces: no other thread runs while it makes one."""
    if isinstance(value, dict) and _is_deep(value.values()):
        for before, (name, each) in zip(chain("{", repeat(", ")), value.items(), strict=False):
            yield f"{before}{json.dumps(name)}: "
            yield from json_of(each)
        yield "}"
    elif isinstance(value, list) and len(value) > AT_ONCE:
        for start in range(0, len(value), AT_ONCE):
            yield f"{', ' if start else '['}{json.dumps(value[start : start + AT_ONCE])[1:-1]}"
        yield "]"
    elif isinstance(value, list) and _is_deep(value):
        for before, each in zip(chain("[", repeat(", ")), value, strict=False):
            yield before
            yield from json_of(each)
        yield "]"
    else:
        yield json.dumps(value)


def _is_deep(values: Iterable[Any]) -> bool:
    return any(isinstance(each, (dict, list)) for each in values)

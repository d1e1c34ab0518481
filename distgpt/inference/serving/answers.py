"""A request that makes sense, and from the engine's events to its answer, whole or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import BytesDecoder, Streamer, Tokenizer
from distgpt.core.generate.request import Event, Likelihood, Request
from distgpt.corpora.chats.format import ChatFormat
from distgpt.inference.serving.limits import Refusal

DONE = b"data: [DONE]\n\n"
_REASONS = {"context": "length"}  # what OpenAI has no word for
AT_ONCE = 256  # elements of a list that become JSON


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


class ChatChoice(Choice):
    """One answer to a chat."""

    prefix, kind, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _role_is_sent = False

    def add(self, event: Event) -> dict[str, Any] | None:
        """Return what is new in a stream's words, whose first piece names the role."""
        new = super().add(event)
        if new is None:
            return None
        message = new.pop("message")
        role = {} if self._role_is_sent else {"role": message["role"]}
        self._role_is_sent = True
        content = {"content": message["content"]} if message["content"] or role else {}
        return {"delta": role | content, **new}

    def _shown(self, text: str, likelihoods: dict[str, list[Any]] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        found: dict[str, Any] | None = None if likelihoods is None else {**likelihoods, "refusal": None}
        return {"message": message, "logprobs": found, "finish_reason": self._reason}

    def _no_likelihoods(self) -> dict[str, list[Any]]:
        return {"content": []}

    def _note(self, found: dict[str, list[Any]], token: int, likelihood: Likelihood | None) -> None:
        if likelihood is None or token in self._request.ends:
            return
        top = [self._token(*pair) for pair in likelihood.alternatives]
        found["content"].append({**self._token(token, likelihood.logprob), "top_logprobs": top})

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, piece = token_text(self._tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(piece)}

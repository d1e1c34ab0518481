"""Parsed requests, and answers built from the engine's events, whole or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import BytesDecoder, Streamer, Tokenizer
from distgpt.core.generate.request import Event, Likelihood, Request
from distgpt.corpora.chats.format import ChatFormat

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    tokenizer: Tokenizer
    vocab: int
    context: int
    created: int  # seconds since 1970
    chat: ChatFormat | DataError | None = None  # or why there is none
    reuse: bool = False  # whether completions reuse the slots' cached tokens
    weight: int = 1  # tokens that each token counts as in the size of an answer
    is_tuned: bool = False  # whether it was trained on chats

    @property
    def chats(self) -> bool:
        """Return whether the model appears to be trained on chats."""
        return isinstance(self.chat, ChatFormat) and (self.is_tuned or self.chat.is_taught)


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A valid body: a request for each prompt, and the format of the answer."""

    served: Served
    requests: list[Request]
    beginnings: list[tuple[str, Streamer]]  # each request's initial text, and a decoder that continues it
    stream: bool
    with_usage: bool  # at the end of a stream
    choice: type[Choice]  # class of the samples
    size: int  # most tokens and log-probabilities of prompts and answer, which take memory

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


class Answer:
    """The choices of a call, ordered by prompt and sample."""

    def __init__(self, parsed: ParsedBody) -> None:
        self._parsed, kind = parsed, parsed.choice
        self._head = {
            "id": f"{kind.prefix}-{secrets.token_hex(12)}",
            "object": kind.part if parsed.stream else kind.kind,
            "created": int(time.time()),
            "model": parsed.served.name,
        }
        self._choices = [
            kind(request, parsed.served.tokenizer, *begins)
            for request, begins in zip(parsed.requests, parsed.beginnings, strict=True)
            for _ in range(request.n)
        ]
        self.tokens = 0  # generated

    def add(self, index: int, event: Event) -> bytes:
        """Add an event of the request `index`. Return the next piece of the stream, which may be empty."""
        number = index * self._parsed.requests[index].n + event.choice
        self.tokens += event.token is not None
        if (new := self._choices[number].add(event)) is None:
            return b""
        more = {"usage": None} if self._parsed.with_usage else {}
        return event_of({**self._head, "choices": [{"index": number, **new}], **more})

    def body(self) -> bytes:
        """Return the whole answer, after the last event."""
        choices = [{"index": number, **choice.whole()} for number, choice in enumerate(self._choices)]
        return json.dumps({**self._head, "choices": choices, "usage": self._usage()}).encode()

    def end(self) -> bytes:
        """Return the end of a stream."""
        if not self._parsed.with_usage:
            return DONE
        return event_of({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, int]:
        prompt, new = self._parsed.prompt_tokens, self.tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Choice:
    """One sample. `text_offset` counts from the start of its text, before stop strings are removed.

    With `echo`, its text starts with the prompt.
    """

    prefix, kind, part = "cmpl", "text_completion", "text_completion"  # prefix of ids, object types
    likelihoods: tuple[str, ...] = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def __init__(self, request: Request, tokenizer: Tokenizer, begins: str, streamer: Streamer) -> None:
        self._request, self._tokenizer, self._streamer = request, tokenizer, streamer.copy()
        self._texts, self._unsent = [begins], begins
        self._reason: str | None = None
        self._offset = 0
        self._all: dict[str, list[Any]] = {name: [] for name in self.likelihoods}

    def add(self, event: Event) -> dict[str, Any] | None:
        """Add an event. Return the new part of the choice, or None."""
        self._texts.append(event.text)
        text, self._unsent = self._unsent + event.text, ""
        self._reason = "length" if event.reason == "context" else event.reason  # OpenAI has no other reason
        result: dict[str, list[Any]] = {name: [] for name in self.likelihoods}
        if self._request.logprobs is not None:
            if event.prompt_likelihoods is not None:
                for token, likelihood in zip(self._request.prompt, event.prompt_likelihoods, strict=True):
                    self._note(result, token, likelihood)
            if event.token is not None:
                self._note(result, event.token, event.likelihood)
        for name, values in result.items():
            self._all[name] += values
        is_scored = any(result.values())
        if not (text or is_scored or self._reason):
            return None
        return self._shown(text, result if is_scored else None)

    def whole(self) -> dict[str, Any]:
        return self._shown("".join(self._texts), None if self._request.logprobs is None else self._all)

    def _shown(self, text: str, likelihoods: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": likelihoods, "finish_reason": self._reason}

    def _note(self, found: dict[str, list[Any]], token: int, likelihood: Likelihood | None) -> None:
        (text, _), top = token_text(self._tokenizer, token), None
        if likelihood is not None:
            pairs = chain(likelihood.alternatives, [(token, likelihood.logprob)])
            top = {token_text(self._tokenizer, each)[0]: logprob for each, logprob in pairs}
        row = text, None if likelihood is None else likelihood.logprob, top, self._offset
        for values, value in zip(found.values(), row, strict=True):
            values.append(value)
        self._offset += len(self._streamer.feed(token))


class ChatChoice(Choice):
    prefix, kind, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    likelihoods = ("content",)
    _role_is_sent = False

    def add(self, event: Event) -> dict[str, Any] | None:
        """Return the delta for a stream; the first one has the role."""
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
        result = None if likelihoods is None else {**likelihoods, "refusal": None}
        return {"message": message, "logprobs": result, "finish_reason": self._reason}

    def _note(self, found: dict[str, list[Any]], token: int, likelihood: Likelihood | None) -> None:
        if likelihood is None or token in self._request.ends:
            return
        top = [self._token(*pair) for pair in likelihood.alternatives]
        found["content"].append({**self._token(token, likelihood.logprob), "top_logprobs": top})

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, piece = token_text(self._tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(piece)}


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return a token's text and bytes. As in OpenAI's API, incomplete characters become bytes:\\xe2\\x80."""
    if isinstance(tokenizer, BytesDecoder) and token < len(tokenizer.pieces):
        piece = tokenizer.pieces[token]
        try:
            return piece.decode(), piece
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece), piece
    text = tokenizer.decode([token])
    return text, text.encode(errors="replace")


def event_of(what: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(what)}\n\n".encode()

"""OpenAI's completions: from events of the engine to the body of an answer, whole or streamed."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.data.tokenizers.plain import BytesDecoder
from distgpt.inference.request import Event, Likelihood, Request
from distgpt.serving.completions import Asked, Served
from distgpt.serving.limits import Refusal

DONE = b"data: [DONE]\n\n"
_REASONS = {"context": "length"}  # what OpenAI has no word for


class Answer:
    """The choices of a call, prompt by prompt, sample by sample."""

    def __init__(self, asked: Asked, served: Served) -> None:
        self._asked, self._served = asked, served
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }
        self._choices = [
            _Choice(request, served.tokenizer, asked.echo)
            for request in asked.requests
            for _ in range(request.n)
        ]
        self.tokens = 0  # generated

    def add(self, index: int, event: Event) -> bytes:
        """Take in an event of the request `index`; return what a stream says of it, which may be nothing."""
        number = index * self._asked.requests[index].n + event.choice
        self.tokens += event.token is not None
        choice = self._choices[number]
        said = choice.add(event)
        if not (said["text"] or said["logprobs"] or said["finish_reason"]):
            return b""
        more = {"usage": None} if self._asked.with_usage else {}
        return _sent({**self._head, "choices": [{"index": number, **said}], **more})

    def whole(self) -> dict[str, Any]:
        """The body, once the last event is there."""
        choices = [{"index": number, **choice.whole()} for number, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def end(self) -> bytes:
        """The last of a stream."""
        if not self._asked.with_usage:
            return DONE
        return _sent({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> dict[str, int]:
        prompt = self._asked.prompt_tokens
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
        self._unsaid = self._text
        self._reason: str | None = None
        self._offset, self._streamer = 0, tokenizer.streamer()
        self._likelihoods: dict[str, list[Any]] | None = None
        if request.logprobs is not None:
            self._likelihoods = _no_likelihoods()
            if not echo:
                for token in request.prompt:
                    self._streamer.feed(token)

    def add(self, event: Event) -> dict[str, Any]:
        """What is new."""
        self._text += event.text
        said, self._unsaid = self._unsaid + event.text, ""
        self._reason = event.reason and _REASONS.get(event.reason, event.reason)
        return {"text": said, "logprobs": self._likelihood(event), "finish_reason": self._reason}

    def whole(self) -> dict[str, Any]:
        return {"text": self._text, "logprobs": self._likelihoods, "finish_reason": self._reason}

    def _likelihood(self, event: Event) -> dict[str, list[Any]] | None:
        """Of the event's token, and of the prompt's if it brings them."""
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

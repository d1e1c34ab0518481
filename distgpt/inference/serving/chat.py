"""OpenAI's chat completions: from messages to a request of the engine, and from its events to an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distgpt.core.base.errors import DataError
from distgpt.core.config import Setting
from distgpt.core.generate.request import Event, Likelihood
from distgpt.corpora.chats.format import checked_messages
from distgpt.inference.serving.completions import (
    MOST_LOGPROBS,
    SETTINGS,
    SWITCH,
    Choice,
    ParsedBody,
    Served,
    beginning,
    checked,
    parse_object,
    parse_settings,
    refuse_large,
    refuse_long,
    refuse_other_model,
    token_text,
    wants_usage,
)
from distgpt.inference.serving.limits import Limits, invalid

# OpenAI's parameters that mean nothing here, and the values that ask for nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
_SETTINGS = {
    name: setting for name, setting in SETTINGS.items() if setting not in ("logprobs", "max_new_tokens")
}
_LENGTHS = ("max_completion_tokens", "max_tokens")
PARAMETERS = ("model", "messages", "stream", "stream_options", "ignore_eos", "logprobs", "top_logprobs")


def parse_chat(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for a chat's next answer. A Refusal says what is wrong with it."""
    found = parse_object(body, (*PARAMETERS, *_LENGTHS, *_SETTINGS, *_IGNORED), _WITHOUT_EFFECT)
    refuse_other_model(found, served)
    stream = checked(found, "stream", SWITCH, False)
    chat = served.chat
    if chat is None or isinstance(chat, DataError):
        raise invalid(f"this model does not chat: {chat}")
    settings = parse_settings(found, limits, _SETTINGS)
    try:
        prompt = chat.prompt(checked_messages(found.get("messages")))
    except DataError as error:
        raise invalid(str(error), "messages") from None
    refuse_long([prompt], served, limits, settings, "messages")
    ends = () if checked(found, "ignore_eos", SWITCH, False) else chat.ends
    settings = replace(
        settings,
        prompt=prompt,
        max_new_tokens=_length(found, limits, max(1, served.context - len(prompt))),
        logprobs=_logprobs(found),
        ends=ends,
        stop=settings.stop + chat.stops,
        reuse=True,
    )
    size = len(prompt) + refuse_large(settings.max_new_tokens, settings, served, limits)
    begins = [beginning(settings, served.tokenizer)]
    return ParsedBody(served, [settings], begins, stream, wants_usage(found), ChatChoice, size)


def _length(given: dict[str, Any], limits: Limits, room: int) -> int:
    """The most tokens of the answer, where nobody says as many as fit."""
    about = Setting(int, "", low=1, most=limits.max_tokens)
    lengths = [checked(given, name, about, None) for name in _LENGTHS]
    found: int = next((length for length in lengths if length is not None), min(room, limits.max_tokens))
    return found


def _logprobs(given: dict[str, Any]) -> int | None:
    top: int | None = checked(given, "top_logprobs", Setting(int, "", low=0, most=MOST_LOGPROBS), None)
    if checked(given, "logprobs", SWITCH, False):
        return top or 0
    if top is not None:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


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

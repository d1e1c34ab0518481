"""From the body of a request to requests of the engine: OpenAI's completions and chats, vLLM's tokenizer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import Setting, nearest
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.request import REQUEST_SETTINGS, Request
from distgpt.core.generate.sample import default_prompt
from distgpt.corpora.chats.format import checked_messages
from distgpt.inference.serving.answers import Beginning, ChatChoice, Choice, ParsedBody, Served
from distgpt.inference.serving.limits import Limits, Refusal, invalid

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of each
# OpenAI's parameters that mean nothing here, and the values that ask for nothing.
_OF_BOTH: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
_OF_TEXTS = {**_OF_BOTH, "best_of": (None, 1), "suffix": (None, "")}
_OF_CHATS = {
    **_OF_BOTH,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
ECHOED = 4  # characters of an echo that count as one token of the answer
HEAVY = 512  # bytes of a token, beyond which it counts as several
_IGNORED = ("user", "metadata")  # which say nothing of the answer
DEFAULTS = Request(max_new_tokens=16, temperature=1.0, overflow="stop")  # OpenAI's
# Parameters that are settings of a request, and their names there.
_OTHERS = ("max_new_tokens", "prompt_logprobs", "lookup")
SETTINGS = {
    "max_tokens": "max_new_tokens",
    **{name: name for name in REQUEST_SETTINGS if name not in _OTHERS},
}
SWITCH = Setting(bool, "")
PARAMETERS = ("model", "prompt", "stream", "stream_options", "echo", "ignore_eos", *SETTINGS)
_CHAT_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
_CHAT_SETTINGS = {
    name: setting for name, setting in SETTINGS.items() if setting not in ("logprobs", "max_new_tokens")
}
_LENGTHS = ("max_completion_tokens", "max_tokens")
_CHAT_PARAMETERS = ("model", "messages", "stream", "stream_options", "ignore_eos", "logprobs", "top_logprobs")


def parse_body(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for completions. A Refusal says what is wrong with it."""
    found = parse_object(body, served, (*PARAMETERS, *_IGNORED), _OF_TEXTS)
    stream, echo = (checked(found, name, SWITCH, False) for name in ("stream", "echo"))
    settings = parse_settings(found, limits, SETTINGS)
    ends = () if checked(found, "ignore_eos", SWITCH, False) else served.tokenizer.ends
    scored = echo and settings.logprobs is not None
    settings = replace(settings, ends=ends, prompt_logprobs=scored, reuse=served.reuse)
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
    body: bytes, served: Served, known: Sequence[str], without_effect: Mapping[str, tuple[Any, ...]] = {}
) -> dict[str, Any]:
    """Return the object of a body with known parameters alone, for the model that is served.

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
    refuse_other_model(found, served)
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


def parse_chat(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for a chat's next answer. A Refusal says what is wrong with it."""
    known = (*_CHAT_PARAMETERS, *_LENGTHS, *_CHAT_SETTINGS, *_CHAT_IGNORED)
    found = parse_object(body, served, known, _OF_CHATS)
    stream = checked(found, "stream", SWITCH, False)
    chat = served.chat
    if chat is None or isinstance(chat, DataError):
        raise invalid(f"this model does not chat: {chat}")
    settings = parse_settings(found, limits, _CHAT_SETTINGS)
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


def about_tokenizer(served: Served) -> dict[str, Any]:
    """Return how the tokens that begin and end a text are spelled, null where there is none."""
    tokenizer = served.tokenizer
    begins, ends = tokenizer.first, tokenizer.ends[:1]
    spelled = {token: text for text, token in tokenizer.specials.items()}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": next(map(spelled.get, begins), None),
        "eos_token": next(map(spelled.get, ends), None),
        "chat_template": chat.source if (chat := tokenizer.chat) else None,
    }


def tokenize(body: bytes, served: Served, limits: Limits) -> dict[str, Any]:
    """Return the ids of a prompt. One that spells a special token, and nothing else, is that token."""
    found = parse_object(body, served, ("model", "prompt", "add_special_tokens"))
    text = "" if found.get("prompt") is None else found["prompt"]
    if not isinstance(text, str):
        raise invalid("prompt must be a text", "prompt")
    tokenizer, with_first = served.tokenizer, checked(found, "add_special_tokens", SWITCH, True)
    try:
        special = tokenizer.specials.get(text)
        ids = tokenizer.encode(text).tolist() if special is None else [special]
    except DataError as error:
        raise invalid(str(error), "prompt") from None
    tokens = [*tokenizer.first, *ids] if with_first else ids
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}


def detokenize(body: bytes, served: Served, limits: Limits) -> dict[str, Any]:
    """Return the text of ids."""
    found = parse_object(body, served, ("model", "tokens"))
    tokens, most = tokens_of(found.get("tokens"), served, "tokens"), ECHOED * limits.values
    if served.tokenizer.text_size(tokens) > most:
        raise invalid(f"the text may have more than {most:,} characters", "tokens")
    return {"prompt": served.tokenizer.decode(tokens)}

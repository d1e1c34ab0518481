"""Parse bodies into requests to the engine: OpenAI's completions and chats, vLLM's tokenizer endpoints."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distgpt.core.base.checked import parse_json
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import Setting, did_you_mean
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.request import REQUEST_SETTINGS, Request
from distgpt.core.generate.sample import default_prompt
from distgpt.corpora.chats.format import checked_messages
from distgpt.inference.serving.answers import ChatChoice, Choice, ParsedBody, Served
from distgpt.inference.serving.limits import Limits, Refusal, invalid

MOST_LOGPROBS = 20
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of each
ECHOED = 4  # characters of an echo that count as one token of the answer
HEAVY = 512  # bytes of a token; a longer one counts as more tokens
DEFAULTS = Request(max_new_tokens=16, temperature=1.0, overflow="stop")  # OpenAI's defaults
SWITCH = Setting(bool, "")
# Parameters that are settings of a request, by their names there.
_OTHERS = ("max_new_tokens", "prompt_logprobs", "lookup")
SETTINGS = {"max_tokens": "max_new_tokens"} | {name: name for name in REQUEST_SETTINGS if name not in _OTHERS}
_CHAT_SETTINGS = {name: name for name in SETTINGS.values() if name not in ("logprobs", "max_new_tokens")}
_LENGTHS = ("max_completion_tokens", "max_tokens")
_OF_BOTH = ("model", "stream", "stream_options", "ignore_eos")
PARAMETERS = (*_OF_BOTH, "prompt", "echo", *SETTINGS)
_CHAT_PARAMETERS = (*_OF_BOTH, "messages", "logprobs", "top_logprobs", *_LENGTHS, *_CHAT_SETTINGS)
# Ignored: OpenAI's parameters that do not affect the answer. Unsupported: rejected unless neutral.
_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}


def parse_body(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for completions, or raise a Refusal."""
    result, tokenizer = parse_object(body, served, PARAMETERS), served.tokenizer
    echo = checked(result, "echo", SWITCH, False)
    settings = parse_settings(result, limits, SETTINGS)
    settings = replace(
        settings,
        ends=() if checked(result, "ignore_eos", SWITCH, False) else tokenizer.ends,
        prompt_logprobs=echo and settings.logprobs is not None,
        reuse=served.reuse,
    )
    prompts = _prompts(result.get("prompt"), served, limits, settings.n)
    length = sum(map(len, prompts))
    tokens = len(prompts) * settings.max_new_tokens + settings.prompt_logprobs * length
    echoed = settings.n * sum(map(tokenizer.text_size, prompts)) if echo else 0
    size = length + refuse_large(tokens, settings, served, limits, -(-echoed // ECHOED))
    refuse_long(prompts, served, limits, settings)
    requests = [replace(settings, prompt=prompt) for prompt in prompts]
    return _parsed(result, served, requests, Choice, size, echo)


def _parsed(
    found: dict[str, Any],
    served: Served,
    requests: list[Request],
    choice: type[Choice],
    size: int,
    echo: bool = False,
) -> ParsedBody:
    """Decode each prompt if it is echoed or if log-probabilities need its text."""
    stream, options = checked(found, "stream", SWITCH, False), found.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    tokenizer = served.tokenizer
    beginnings = [
        (tokenizer.decode(request.prompt), tokenizer.streamer())
        if echo
        else ("", tokenizer.streamer_behind(() if request.logprobs is None else request.prompt))
        for request in requests
    ]
    return ParsedBody(served, requests, beginnings, stream, bool(options.get("include_usage")), choice, size)


def weight_of(tokenizer: Tokenizer) -> int:
    """Return how many tokens each token counts as. In third-party vocabularies, one may have megabytes."""
    return max(1, max(tokenizer.text_size([token]) for token in range(tokenizer.size)) // HEAVY)


def parse_object(body: bytes, served: Served, known: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object of a body. Rejects unknown parameters and other models."""
    try:
        result = parse_json(body)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON ({error})") from None
    if not isinstance(result, dict):
        raise invalid("the body is not a JSON object")
    for name, value in result.items():
        if name not in known and name not in _IGNORED and name not in _UNSUPPORTED:
            hint = did_you_mean(name[:50], known)
            raise invalid(f"unrecognized request argument: {name!r:.60}{hint}", name[:50])
        if value not in _UNSUPPORTED.get(name, (value,)):
            raise invalid(f"{name} is not supported", name)
    refuse_other_model(result, served)
    return result


def refuse_other_model(found: dict[str, Any], served: Served) -> None:
    if (name := checked(found, "model", Setting(str, ""), served.name)) != served.name:
        text = f"the model {name!r:.200} does not exist; this server has {served.name!r:.200}"
        raise Refusal(404, text, param="model", code="model_not_found")


def refuse_large(tokens: int, settings: Request, served: Served, limits: Limits, echoed: int = 0) -> int:
    """Return the maximum size of an answer with `tokens` per sample. Raises a Refusal if it is too large."""
    most = tokens * settings.n * (1 + (settings.logprobs or 0)) * served.weight + echoed
    if most > limits.values:
        long = f" (each counts as {served.weight} in this vocabulary)" if served.weight > 1 else ""
        raise invalid(f"the answer may have {most:,} tokens and logprobs{long}, more than {limits.values:,}")
    return most


def parse_settings(given: dict[str, Any], limits: Limits, names: Mapping[str, str]) -> Request:
    """Return a request without its prompt; `names` maps parameters to settings."""
    most = {"max_tokens": limits.max_tokens, "n": limits.samples, "logprobs": MOST_LOGPROBS}
    result: dict[str, Any] = {}
    for name, setting in names.items():
        about = REQUEST_SETTINGS[setting]
        if name == "stop":
            result[name] = _stops(given.get(name))
        elif name == "seed":
            value = checked(given, name, replace(about, low=-(1 << 63)), secrets.randbits(63))
            result[name] = value % (1 << 64)
        else:
            about = replace(about, most=most.get(name, about.most))
            result[setting] = checked(given, name, about, getattr(DEFAULTS, setting))
    return DEFAULTS.override((), result)


def checked(given: dict[str, Any], name: str, about: Setting, default: Any) -> Any:
    """Return a valid parameter, or the default if it is absent or null."""
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
        raise invalid("stop must be a string or a list of strings", "stop")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise invalid(f"stop may have up to {MOST_STOPS} strings of up to {LONGEST_STOP} characters", "stop")
    return [text for text in texts if text]


def _prompts(value: Any, served: Served, limits: Limits, n: int) -> list[list[int]]:
    """Return the tokens of each prompt: a string, strings, tokens, lists of tokens, or nothing."""
    if value is None:
        return [default_prompt(served.tokenizer)]
    several = isinstance(value, list) and bool(value) and type(value[0]) in (str, list)
    prompts = value if several else [value]
    if (samples := len(prompts) * n) > limits.samples:
        raise invalid(f"{samples:,} samples exceed the limit, {limits.samples:,}", "n" if n > 1 else "prompt")
    if not isinstance(prompts[0], str):
        return [tokens_of(prompt, served) for prompt in prompts]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("prompt must not mix strings and tokens", "prompt")
    try:
        return [served.tokenizer.encode_prompt(prompt) for prompt in prompts]
    except DataError as error:
        raise invalid(str(error), "prompt") from None


def tokens_of(prompt: Any, served: Served, name: str = "prompt") -> list[int]:
    """Return the tokens if all are in the vocabulary."""
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        of_texts = "a string, a list of strings, tokens, or a list of lists" if name == "prompt" else "tokens"
        raise invalid(f"{name} must be {of_texts}", name)
    if not all(0 <= token < served.vocab for token in prompt):
        raise invalid(f"{name}: tokens must be at least 0 and less than {served.vocab:,}", name)
    return prompt


def refuse_long(
    prompts: Sequence[list[int]], served: Served, limits: Limits, settings: Request, param: str = "prompt"
) -> None:
    longest = max(map(len, prompts))
    if not all(map(len, prompts)):
        raise invalid("the prompt is empty; pass at least one token", param)
    problem = ""
    if longest > served.context and (settings.prompt_logprobs or settings.overflow == "stop"):
        hint = ', or send "overflow": "shift", which drops its start'
        hint = ", or omit logprobs or echo" if settings.prompt_logprobs else hint
        problem = (
            f"the prompt has {longest:,} tokens, more than the context of {served.context:,}; shorten it"
        )
        problem += hint
    elif longest > limits.prompt_tokens:
        problem = f"the prompt has {longest:,} tokens, more than {limits.prompt_tokens:,}"
    if problem:
        raise invalid(problem, param, "context_length_exceeded")


def parse_chat(body: bytes, served: Served, limits: Limits) -> ParsedBody:
    """Parse a request for a chat's next answer, or raise a Refusal."""
    result = parse_object(body, served, _CHAT_PARAMETERS)
    chat = served.chat
    if chat is None or isinstance(chat, DataError):
        raise invalid(f"this model does not support chat: {chat}")
    settings = parse_settings(result, limits, _CHAT_SETTINGS)
    try:
        prompt = chat.prompt(checked_messages(result.get("messages")))
    except DataError as error:
        raise invalid(str(error), "messages") from None
    refuse_long([prompt], served, limits, settings, "messages")
    about, room = Setting(int, "", low=1, most=limits.max_tokens), max(1, served.context - len(prompt))
    lengths = [checked(result, name, about, None) for name in _LENGTHS]
    settings = replace(
        settings,
        prompt=prompt,
        max_new_tokens=next(filter(None, lengths), min(room, limits.max_tokens)),
        logprobs=_logprobs(result),
        ends=() if checked(result, "ignore_eos", SWITCH, False) else chat.ends,
        stop=settings.stop + chat.stops,
        reuse=True,
    )
    size = len(prompt) + refuse_large(settings.max_new_tokens, settings, served, limits)
    return _parsed(result, served, [settings], ChatChoice, size)


def _logprobs(given: dict[str, Any]) -> int | None:
    top: int | None = checked(given, "top_logprobs", Setting(int, "", low=0, most=MOST_LOGPROBS), None)
    if checked(given, "logprobs", SWITCH, False):
        return top or 0
    if top is not None:
        raise invalid("top_logprobs requires logprobs to be true", "top_logprobs")
    return None


def about_tokenizer(served: Served) -> dict[str, Any]:
    """Return the start and end tokens as strings (null if none) and the chat template."""
    tokenizer = served.tokenizer
    spelled = {token: text for text, token in tokenizer.specials.items()}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": next(map(spelled.get, tokenizer.first), None),
        "eos_token": next(map(spelled.get, tokenizer.ends), None),
        "chat_template": chat.source if (chat := tokenizer.chat) else None,
    }


def tokenize(body: bytes, served: Served, limits: Limits) -> dict[str, Any]:
    """Return the token ids of a prompt. A prompt that is exactly a special token becomes that token."""
    result = parse_object(body, served, ("model", "prompt", "add_special_tokens"))
    text = "" if result.get("prompt") is None else result["prompt"]
    if not isinstance(text, str):
        raise invalid("prompt must be a string", "prompt")
    tokenizer = served.tokenizer
    first = tokenizer.first if checked(result, "add_special_tokens", SWITCH, True) else ()
    try:
        special = tokenizer.specials.get(text)
        ids = tokenizer.encode(text).tolist() if special is None else [special]
    except DataError as error:
        raise invalid(str(error), "prompt") from None
    tokens = [*first, *ids]
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}


def detokenize(body: bytes, served: Served, limits: Limits) -> dict[str, Any]:
    result = parse_object(body, served, ("model", "tokens"))
    tokens, most = tokens_of(result.get("tokens"), served, "tokens"), ECHOED * limits.values
    if served.tokenizer.text_size(tokens) > most:
        raise invalid(f"the text may have more than {most:,} characters", "tokens")
    return {"prompt": served.tokenizer.decode(tokens)}

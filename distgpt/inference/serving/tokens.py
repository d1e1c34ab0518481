"""The tokenizer over HTTP, as vLLM offers it: so evaluation harnesses need no tokenizer of their own."""

from __future__ import annotations

from typing import Any

from distgpt.core.base.errors import DataError
from distgpt.inference.serving.completions import (
    ECHOED,
    SWITCH,
    Served,
    checked,
    parse_object,
    refuse_other_model,
    tokens_of,
)
from distgpt.inference.serving.limits import Limits, invalid


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
    found = parse_object(body, ("model", "prompt", "add_special_tokens"), {})
    refuse_other_model(found, served)
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
    found = parse_object(body, ("model", "tokens"), {})
    refuse_other_model(found, served)
    tokens, most = tokens_of(found.get("tokens"), served, "tokens"), ECHOED * limits.values
    if served.tokenizer.text_size(tokens) > most:
        raise invalid(f"the text may have more than {most:,} characters", "tokens")
    return {"prompt": served.tokenizer.decode(tokens)}

"""`model.generate` of the Python API: text or token prompts in, results of the same kind out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError, escape
from distgpt.core.comm.agree import broadcast, collective_error, gather, on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import MOST_SLOTS, agreed_slots
from distgpt.core.generate.request import Completion, Request
from distgpt.core.generate.slots import Slots, on_ranks
from distgpt.core.model.model import Model


def generate(
    model: Model,
    tokenizer: Tokenizer | None,
    comm: Comm,
    prompt: Any,
    stream: bool,
    settings: dict[str, Any],
) -> Any:
    """Implement `GPT.generate`. Collective: ranks average logits for one prompt and distribute multiple."""
    n, logprobs = settings.get("n"), settings.get("logprobs")
    settings = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in settings.items()
        if name != "n" or value is not None
    }

    def understood() -> tuple[bool, list[Any], list[Request]]:
        several = _is_several(prompt)
        prompts = list(prompt) if several else [prompt]
        template = Request().override((), settings)
        return several, prompts, [template.override(_tokens(each, model, tokenizer), {}) for each in prompts]

    several, prompts, requests = on_every_rank(comm, understood)
    if stream and (several or n is not None or logprobs is not None or comm.size > 1):
        raise collective_error(
            UsageError("stream requires one sample of one prompt, without logprobs, on one rank")
        )
    wanted = min(MOST_SLOTS, sum(request.n for request in requests))
    slots = agreed_slots(model, wanted, comm, lookup=max((each.lookup for each in requests), default=0))
    if stream:
        return _streamed(Engine(slots, tokenizer), requests[0], isinstance(prompt, str))
    result = []
    for each, samples in zip(prompts, _samples(slots, tokenizer, comm, requests), strict=True):
        shown = [_shown(sample, isinstance(each, str), logprobs is not None) for sample in samples]
        result.append(shown[0] if n is None else shown)
    return result if several else result[0]


def _tokens(prompt: Any, model: Model, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(prompt, str):
        _refuse_no_prompt(prompt)
        ids = tokens_in(prompt, model.config.vocab_size) if len(prompt) else np.empty(0, int)
        return list(ids.reshape(-1).tolist())
    if tokenizer is None:
        raise UsageError("this model has no tokenizer; pass the prompt as tokens")
    return tokenizer.encode_prompt(prompt)


def _streamed(engine: Engine, request: Request, is_text: bool) -> Iterator[str | int]:
    engine.submit(request)
    for event in engine.run():
        if is_text and event.text:
            yield event.text
        elif not is_text and event.token is not None:
            yield event.token


def _samples(
    slots: Slots, tokenizer: Tokenizer | None, comm: Comm, requests: list[Request]
) -> list[list[Completion]]:
    if len(requests) == 1:
        own = on_ranks(slots, comm, lambda slots: complete(Engine(slots, tokenizer), requests))
        return list(broadcast(comm, own))
    result: list[list[Completion]] = [[] for _ in requests]
    share = requests[comm.rank :: comm.size]
    own = on_every_rank(comm, lambda: complete(Engine(slots, tokenizer), share))
    for rank, samples in enumerate(gather(comm, own)):
        result[rank :: comm.size] = samples
    return result


def _is_several(prompt: Any) -> bool:
    """Return whether the prompt is a list of prompts, of text or of lists of tokens."""
    if isinstance(prompt, str):
        return False
    _refuse_no_prompt(prompt)
    return len(prompt) > 0 and (isinstance(prompt[0], str) or hasattr(prompt[0], "__len__"))


def _refuse_no_prompt(given: Any) -> None:
    is_one = given.ndim == 0 if isinstance(given, np.ndarray) else not isinstance(given, Sequence)
    if is_one:
        wanted = "a string, a list of tokens, or a list of these"
        raise UsageError(f"the prompt must be {wanted}, not {escape(repr(given)):.60}")


def _shown(sample: Completion, is_text: bool, whole: bool) -> Completion | str | list[int]:
    if whole:
        return sample
    return sample.text if is_text else sample.tokens


def tokens_in(given: Any, vocab: int) -> Any:
    """Return valid token ids as an array of shape (T,) or (B, T). Raises a DataError."""
    try:
        ids = np.asarray(given)
    except ValueError:
        raise DataError("tokens must have shape (B, T): sequences must have the same length") from None
    if ids.ndim not in (1, 2) or ids.size == 0 or ids.dtype.kind not in "iu":
        raise DataError(
            f"tokens must be integers of shape (T,) or (B, T), not {ids.dtype} of shape {ids.shape}"
        )
    if ids.min() < 0 or ids.max() >= vocab:
        raise DataError(f"tokens must be at least 0 and less than {vocab}")
    return ids

"""A short text from a model that is being trained."""

from __future__ import annotations

from distgpt.config import DEFAULT_TEMPERATURE
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.inference.engine_setup import engine_for
from distgpt.inference.request import Request
from distgpt.inference.sample import default_prompt
from distgpt.interrupts import PendingSignals
from distgpt.model.model import Model


def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, signals: PendingSignals | None = None
) -> str:
    """Starting from a line break or the first token there is; shorter when a signal comes meanwhile."""
    engine, text = engine_for(model, tokenizer, 1), ""
    engine.submit(
        Request(default_prompt(tokenizer), length, temperature=DEFAULT_TEMPERATURE, top_k=50, seed=seed)
    )
    while not engine.is_idle and not (signals and signals.came):
        text += "".join(event.text for event in engine.step())
    return text

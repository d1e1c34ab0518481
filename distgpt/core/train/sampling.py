"""Short texts of a model, while it trains and once it has."""

from __future__ import annotations

from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.config import DEFAULT_TEMPERATURE
from distgpt.core.cpu.first_use import compiling_for
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import default_prompt
from distgpt.core.model.model import Model


@compiling_for("the sample")
def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, signals: PendingSignals | None = None
) -> str:
    """Write a short text from a line break, or the first token there is; shorter when a signal comes."""
    engine = Engine(PlainSlots(model, 1), tokenizer)
    engine.submit(
        Request(default_prompt(tokenizer), length, temperature=DEFAULT_TEMPERATURE, top_k=50, seed=seed)
    )
    pieces: list[str] = []
    while not engine.is_idle and not (signals and signals.came):
        pieces.extend(event.text for event in engine.step())
    return "".join(pieces)

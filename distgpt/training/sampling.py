"""A short text from a model that is being trained."""

from __future__ import annotations

from itertools import takewhile

from distgpt.comm.serial import SerialComm
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.interrupts import Noted
from distgpt.model.generate import Sampling, generate, opening
from distgpt.model.model import Model


def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, noted: Noted | None = None
) -> str:
    """Starting from a line break or the first token there is; shorter when a signal comes meanwhile."""
    alone, prompt = SerialComm(), opening(tokenizer)
    chosen = generate(model, prompt, length, Sampling(temperature=0.8, top_k=50, seed=seed), alone)
    return tokenizer.decode(list(takewhile(lambda token: not (noted and noted.came), chosen)))

"""Bits per byte: a loss in a unit that models with other tokenizers share."""

from __future__ import annotations

import math

import numpy as np

from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import Corpus
from distgpt.core.data.plain import BytesDecoder
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.ops.api import Array

SAMPLED = 1 << 20  # tokens of a text that say how many bytes its tokens have
DECODED = 1 << 17  # of those, where each token has to be decoded


def text_bytes(ids: Array, tokenizer: Tokenizer) -> int:
    """Return the length of these tokens' text in UTF-8, without separators between documents."""
    ids = ids[ids != tokenizer.separator]
    if isinstance(tokenizer, BytesDecoder):  # whose ids may hold parts of characters
        lengths = np.array([len(piece) for piece in tokenizer.pieces])
        return int(lengths[ids].sum())
    return len(tokenizer.decode(ids).encode())


def bytes_per_token(corpus: Corpus, batches: Batches) -> float | None:
    """Return how many bytes a token of the training text has; None where it has none."""
    if not corpus.is_text:
        return None
    ids, tokenizer = batches.sample(SAMPLED), corpus.tokenizer
    if not isinstance(tokenizer, BytesDecoder):
        ids = ids[:DECODED]
    return text_bytes(ids, tokenizer) / len(ids) or None


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """Return a loss in nats per token in bits per byte; None where either is unknown."""
    if loss is None or not bytes_per_token:
        return None
    return loss / math.log(2) / bytes_per_token

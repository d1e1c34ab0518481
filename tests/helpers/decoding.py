"""Slots of every kind, models of odd sizes, and the training pass's logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.corpora.tokenizers.collected import CharTokenizer
from distgpt.inference.decoding.batched import BatchedSlots
from distgpt.inference.decoding.compiled import CompiledSlots
from distgpt.inference.quantized.integers import (
    BLOCKS,
    LEAST,
    MOST,
    TRIED,
    Quantised,
    inverse,
    nearest,
    quantise,
    restored,
)
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from distgpt.models.quantized.rounded import bits_of

import models
from models import BASE, VARIANTS

LETTERS = CharTokenizer("abcdefghijklm")


class Kind(NamedTuple):
    kernels: Callable  # takes the number of threads
    slots: type
    tolerance: float  # relative to the largest logit


KINDS = {
    "plain": Kind(lambda threads: Kernels("float64"), PlainSlots, 1e-12),
    "plain, compiled operations": Kind(lambda threads: CpuKernels("float64", threads), PlainSlots, 1e-12),
    "batched": Kind(lambda threads: Kernels("float64"), BatchedSlots, 1e-12),
    "batched, compiled operations": Kind(lambda threads: CpuKernels("float64", threads), BatchedSlots, 1e-12),
    "float32": Kind(lambda threads: CpuKernels("float32", threads), CompiledSlots, 4e-6),
    "bfloat16": Kind(Bfloat16Kernels, CompiledSlots, 4e-2),
    "int8": Kind(Int8Kernels, CompiledSlots, 6e-2),
    "int4": Kind(lambda threads: Int8Kernels(threads, "int4"), CompiledSlots, 6e-2),
}
EXACT = ("float32", "bfloat16", "int8", "int4")  # bitwise identical for any split of a sequence
# Each is compiled separately; bfloat16 shares its cache with int8, its weights with training.
MARKS = {"bfloat16": pytest.mark.slow, "int4": pytest.mark.ci}


def marked(*kinds):
    return [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in kinds]


# Rows, heads and blocks that fill no vector, no panel and no block, and contexts of several panels.
_LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False}
SHAPES = {name: replace(config, seq_len=50) for name, config in VARIANTS.items()} | {
    name: replace(BASE, **{"vocab_size": 97, "seq_len": 50, "n_head": 2, "n_embd": 48, "tied": True, **changes})
    for name, changes in {
        "llama": {**_LLAMA, "tied": False},
        "odd": {"n_embd": 66, "n_head": 3, "mlp_width": 101, "vocab_size": 129, "embed_norm": True},
        "five heads": {**_LLAMA, "positions": "learned", "n_embd": 70, "n_head": 5, "norm_gain": False, "tied": False},
        "small heads": {"head_dim": 6, "norm": "rmsnorm", "mlp": "swiglu", "mlp_width": 37},
        "heads of eleven": {"n_embd": 66, "n_head": 6, "n_kv_head": 2},
        "short": {"window": 17, "full_every": 0},
        "wide": {"n_embd": 32, "n_head": 1, "mlp_width": 1100, "positions": "rope", "embed_norm": True},
    }.items()
}


def build(shape, kernels):
    model = Model(Architecture(SHAPES[shape]), kernels)
    random = np.random.default_rng(7)
    for spec in model.layout.specs:
        values = random.normal(0, 0.1 if spec.is_matrix else 0.3, spec.shape)
        kernels.put(model.params[spec.name], values + (spec.name.endswith(".w") and not spec.is_matrix))
    return int8_of(model, kernels) if isinstance(kernels, Int8Kernels) else model


def slots_of(shape, kind, count, threads=2):
    slots = KINDS[kind].slots(build(shape, KINDS[kind].kernels(threads)), count)
    for array in getattr(slots, "cache", ()):
        array[...] = 0x7FC0 if array.dtype == np.uint16 else np.nan
    return slots


def round_alike(x, spec, dtype):
    bits = bits_of(spec, dtype)
    return restored((quantise if bits == 8 else quantise4)(x)) if bits else x


def sequences(shape):
    random = np.random.default_rng(3)
    return [random.integers(0, SHAPES[shape].vocab_size, length).tolist() for length in (1, 2, 15, 33, 50)]


def distance(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def plain_scores(model, tokens):
    work = Pass(model, 1, len(tokens), training=False)
    hidden = work.forward(model.kernels.integers(tokens))
    scores = model.kernels.zeros(len(tokens), model.config.padded_vocab)
    work.logits(scores, hidden)
    return scores[:, : model.config.vocab_size]


class Watched:
    """Slots that note what they are fed: (slot, start, tokens)."""

    def __init__(self, slots):
        self._slots, self.fed, self.calls, self.most = slots, [], 0, 0

    def __getattr__(self, name):
        return getattr(self._slots, name)

    def feed(self, work):
        self.fed += [(each.slot, each.start, len(each.tokens)) for each in work]
        self.calls += 1
        self.most = max(self.most, sum(len(each.tokens) for each in work if len(each.tokens) > 1))
        assert len({each.slot for each in work}) == len(work)
        return self._slots.feed(work)

    @property
    def tokens(self):
        return sum(tokens for *_, tokens in self.fed)


def model(kind="gpt2", dtype="float64", **changes):
    return models.build(replace(VARIANTS[kind], **changes), CpuKernels(dtype, 2))


def varied_requests(count, vocab=13):
    random, requests = np.random.default_rng(5), []
    for i in range(count):
        how = {"temperature": float(random.choice([0, 0.7, 1.5])), "top_k": int(random.choice([0, 5]))}
        how |= {"top_p": float(random.choice([1, 0.8])), "repetition_penalty": float(random.choice([1, 1.3]))}
        how["overflow"] = ("slide", "shift")[i % 2]
        prompt = random.integers(0, vocab, random.integers(1, 60)).tolist()
        more = {"n": 1 + i % 3, "logprobs": 2, "lookup": 3 * (i % 4 == 0), "seed": i % 5}
        more["prompt_logprobs"] = i % 5 == 0 and len(prompt) <= 24
        requests.append(Request(prompt, int(random.integers(0, 40)), **how, **more))
    return requests


def quantise4(w):
    """Round a float32 matrix to int4, each block by the tried scale with the smallest error.

    The best scale for integers q is Σ w q / Σ q², which reduces the squared error by (Σ w q)² / Σ q².
    """
    n, k = w.shape
    block = BLOCKS[4]
    blocks = -(-k // block)
    padded = np.zeros((n, blocks * block), np.float32)
    padded[:, :k] = w
    each = padded.reshape(n, blocks, block)
    top = np.abs(each).max(2) / np.float32(MOST)
    best, scale = np.zeros_like(top), np.zeros_like(top)
    for part in TRIED:
        tried = (top * part)[..., None]
        x, q = each * inverse(tried), nearest(each, tried).astype(np.float32)
        product, square = (x * q).sum(2), (q * q).sum(2) + np.float32(LEAST)
        gain = (product * part) ** 2 / square
        scale = np.where(gain > best, product / square * (top * part), scale)
        best = np.maximum(best, gain)
    bits = to_bfloat16(scale)
    q = nearest(each, from_bfloat16(bits)[..., None])
    return Quantised(np.ascontiguousarray(q.reshape(n, -1)[:, :k]), bits, 4)

"""`model.generate` on ranks, and slots that fit into memory."""

from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, NonFiniteError, UsageError
from distgpt.core.comm.resources import Memory
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate import engine_setup
from distgpt.core.generate.engine_setup import CACHE_BYTES, slot_bytes, slots_for, slots_that_fit, warmup_pass
from distgpt.core.generate.python_api import generate
from distgpt.core.model.model import Architecture, Model
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from threadranks import on_all_ranks

from models import VARIANTS, build

CONFIG = ModelConfig(vocab_size=13, seq_len=7, n_layer=1, n_head=2, n_embd=16, init_std=0.2)


def made(damaged=False):
    model = Model(Architecture(CONFIG), CpuKernels("float64", 1))
    model.initialise(3)
    if damaged:
        model.params["wte"][...] = np.nan
    return model


def on_ranks(prompt, damaged=None, stream=False, **settings):
    """Generate on three ranks; on rank `damaged` the weights are NaN."""
    how = {"max_new_tokens": 3, **settings}
    return on_all_ranks(3, lambda comm: generate(made(comm.rank == damaged), None, comm, prompt, stream, how))


def test_ranks_share_prompts_and_results():
    prompts = [[1, 2], [3], [4, 5, 6], [7], [8]]
    (alone,) = on_all_ranks(1, lambda comm: generate(made(), None, comm, prompts, False, {"max_new_tokens": 3}))
    assert on_ranks(prompts) == [alone] * 3


@pytest.mark.parametrize("prompt, how, error, words", [
    ([[1], [2], [1] * 12], {"overflow": "stop"}, UsageError, "12 tokens.* 7"),
    ([[1], [2]], {"stop": "a"}, UsageError, "tokenizer"),
    ([[1], [2], [99]], {}, DataError, "less than 13"),
    ([[1], [2], [3]], {"damaged": 1}, NonFiniteError, "rank 1: the model's logits"),
    ([[1], [2]], {"damaged": 0}, NonFiniteError, "rank 0: the model's logits"),
    ([1], {"temperature": -1.0}, UsageError, "temperature"),
    ([1], {"stream": True}, UsageError, "on one rank"),
])  # fmt: skip
def test_error_of_one_rank_is_raised_by_all(prompt, how, error, words):
    for found in on_ranks(prompt, **how):
        with pytest.raises(error, match=words):
            raise found
        assert found.shared


def test_slots_fit_into_memory():
    config = replace(VARIANTS["gpt2"], seq_len=1000, n_layer=4)
    model = build(config, CpuKernels("float32", 1))
    one = slot_bytes(model)
    assert slots_that_fit(model, 32, 10 * one + 5) == 10 and slots_that_fit(model, 3, 10 * one) == 3
    assert slots_that_fit(model, 32, 7) == 1 and 1 <= slots_that_fit(model, 1 << 40) <= CACHE_BYTES // one
    guessing = slot_bytes(model, lookup=64)
    assert guessing == one + 64 * 4 * config.padded_vocab
    assert slots_that_fit(model, 32, 10 * guessing - 1, lookup=64) == 9
    assert slots_that_fit(model, 32, 10 * guessing - 1) == 10


def test_slots_share_memory_of_a_host(monkeypatch):
    model = build(VARIANTS["gpt2"], CpuKernels("float32", 1))
    granted = 2 * 12 * slot_bytes(model)
    monkeypatch.setattr(engine_setup, "granted_memory", lambda ranks: Memory(granted // ranks))
    for ranks, expected in ((1, 12), (2, 6), (4, 3), (100, 1)):
        assert slots_that_fit(model, 32, ranks=ranks) == expected
    monkeypatch.setattr(engine_setup, "slots_for", lambda model, count: count)
    counts = on_all_ranks(4, lambda comm: engine_setup.agreed_slots(model, 32, comm), per_node=2)
    assert counts == [6] * 4


@pytest.mark.parametrize("kind, seq_len", [("gpt2", 1), ("gpt2", 2), ("grouped queries", 9)])
def test_warmup_fits_any_context(kind, seq_len):
    model = build(replace(VARIANTS[kind], seq_len=seq_len), CpuKernels("float32", 1))
    warmup_pass(model)
    warmup_pass(int8_of(model, Int8Kernels(1)))


def test_slots_are_compiled_except_in_training_or_float64():
    one, exact = (build(VARIANTS["gpt2"], CpuKernels(dtype, 1)) for dtype in ("float32", "float64"))
    models = [one, int8_of(one, Int8Kernels(1)), exact]
    kinds = [type(slots_for(model, 1)).__name__ for model in models]
    assert kinds == ["CompiledSlots", "CompiledSlots", "PlainSlots"]
    one.make_gradients()
    assert type(slots_for(one, 1)).__name__ == "PlainSlots"

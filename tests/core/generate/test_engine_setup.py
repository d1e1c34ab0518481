"""How many slots fit into memory, and which kind of them a model gets."""

from dataclasses import replace

import pytest
from distgpt.core.comm.resources import Memory
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate import engine_setup
from distgpt.core.generate.engine_setup import CACHE_BYTES, slot_bytes, slots_for, slots_that_fit, warmup_pass
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from threadranks import on_all_ranks

from models import VARIANTS, build


def test_there_are_as_many_slots_as_their_memory_allows():
    config = replace(VARIANTS["gpt2"], seq_len=1000, n_layer=4)
    model = build(config, CpuKernels("float32", 1))
    one = slot_bytes(model)
    assert slots_that_fit(model, 32, 10 * one + 5) == 10
    assert slots_that_fit(model, 3, 10 * one) == 3
    assert slots_that_fit(model, 32, 7) == 1
    assert 1 <= slots_that_fit(model, 1 << 40) <= CACHE_BYTES // one
    guessing = slot_bytes(model, lookup=64)
    assert guessing == one + 64 * 4 * config.padded_vocab
    assert slots_that_fit(model, 32, 10 * guessing - 1, lookup=64) == 9
    assert slots_that_fit(model, 32, 10 * guessing - 1) == 10


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    model = build(VARIANTS["gpt2"], CpuKernels("float32", 1))
    granted = 2 * 12 * slot_bytes(model)
    monkeypatch.setattr(engine_setup, "granted_memory", lambda ranks: Memory(granted // ranks))
    for ranks, expected in ((1, 12), (2, 6), (4, 3), (100, 1)):
        assert slots_that_fit(model, 32, ranks=ranks) == expected
    monkeypatch.setattr(engine_setup, "slots_for", lambda model, count: count)
    counts = on_all_ranks(4, lambda comm: engine_setup.agreed_slots(model, 32, comm), per_node=2)
    assert counts == [6] * 4


@pytest.mark.parametrize("kind, seq_len", [("gpt2", 1), ("gpt2", 2), ("grouped queries", 9)])
def test_a_rehearsal_fits_any_context(kind, seq_len):
    model = build(replace(VARIANTS[kind], seq_len=seq_len), CpuKernels("float32", 1))
    warmup_pass(model)
    warmup_pass(int8_of(model, Int8Kernels(1)))


def test_slots_are_compiled_unless_the_model_is_trained_or_float64():
    one, exact = (build(VARIANTS["gpt2"], CpuKernels(dtype, 1)) for dtype in ("float32", "float64"))
    models = [one, int8_of(one, Int8Kernels(1)), exact]
    kinds = [type(slots_for(model, 1)).__name__ for model in models]
    assert kinds == ["CompiledSlots", "CompiledSlots", "PlainSlots"]
    one.make_gradients()
    assert type(slots_for(one, 1)).__name__ == "PlainSlots"

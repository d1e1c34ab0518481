"""Sampling of tokens: comparison with a full sort, frequencies and random numbers."""

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
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.sampling import candidates, choose, likelihood, topk_logits, uniform
from distgpt.core.model.model import Architecture, Model
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from hypothesis import given, settings
from hypothesis import strategies as st
from threadranks import on_all_ranks

from models import VARIANTS, build


def by_definition(scores, how):
    order = np.argsort(-scores, kind="stable")
    if how.top_k:
        order = order[: how.top_k]
    p = np.exp((scores[order].astype(float) - scores.max()) / how.temperature)
    p /= p.sum()
    p = p[: int(np.searchsorted(np.cumsum(p), how.top_p)) + 1] if how.top_p < 1 else p
    p = np.where(p >= how.min_p * p[0], p, 0)
    out = np.zeros(len(scores))
    out[order[: len(p)]] = p / p.sum()
    return out


SAMPLINGS = st.builds(
    Sampling, temperature=st.sampled_from([0.3, 1.0, 2.7]), top_k=st.sampled_from([0, 1, 3, 700, 9000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-9]), min_p=st.sampled_from([0.0, 0.01, 0.4, 1.0]),
)  # fmt: skip


@given(st.integers(0, 99), st.sampled_from([1, 5, 4001]), st.sampled_from(["f4", "f8"]), st.booleans(), SAMPLINGS)
@settings(max_examples=200)
def test_candidates_match_the_definition(seed, vocab, dtype, equal, how):
    scores = (3 * np.random.default_rng(seed).standard_normal(vocab)).astype(dtype)
    scores = np.round(scores) if equal else scores
    tokens, p = candidates(scores, how)
    found = np.zeros(vocab)
    found[slice(None) if tokens is None else tokens] = p / p.sum()
    np.testing.assert_allclose(found, by_definition(scores, how), atol=1e-6)


def test_frequencies_follow_the_truncated_softmax():
    chances = np.array([0.1, 0.6, 0.3])
    for how, expected in (
        ({}, chances), ({"temperature": 0.5}, chances**2 / (chances**2).sum()),
        ({"top_k": 2}, [0, 2 / 3, 1 / 3]), ({"top_p": 0.7}, [0, 2 / 3, 1 / 3]), ({"top_p": 0.5}, [0, 1, 0]),
        ({"min_p": 0.4}, [0, 2 / 3, 1 / 3]), ({"top_p": 0.95, "min_p": 0.9}, [0, 1, 0]),
    ):  # fmt: skip
        sampling = Sampling(**{"temperature": 1.0, **how})
        drawn = [choose(np.log(chances), sampling, uniform(0, 0, i)) for i in range(4000)]
        found = np.bincount(drawn, minlength=3) / 4000
        np.testing.assert_allclose(found, expected, atol=0.03, err_msg=str(how))
        assert not found[np.equal(expected, 0)].any(), how


def test_topk_matches_a_stable_sort():
    random = np.random.default_rng(0)
    for k, vocab in [(k, vocab) for k in (1, 2, 17, 499, 500, 900) for vocab in (500, 5003, 70000)]:
        scores = random.integers(0, vocab // 25, vocab).astype(np.float32)
        np.testing.assert_array_equal(topk_logits(scores, k), np.argsort(-scores, kind="stable")[:k])


def test_repetition_penalty_handles_both_signs():
    scores, greedy = np.array([2.0, 1.5, -1.0, -1.2]), Sampling(repetition_penalty=1.5)
    assert choose(scores, greedy, 0.0) == 0
    assert choose(scores, greedy, 0.0, [0, 0, 3]) == 1  # 2 / 1.5 < 1.5
    assert choose(scores[2:], greedy, 0.0, [0]) == 1  # -1 · 1.5 < -1.2
    assert choose(scores, Sampling(repetition_penalty=0.5), 0.0, [1]) == 1
    assert scores[0] == 2.0, "the caller's scores were changed"
    large = np.array([1e30, -1e30, 1], np.float32)
    for penalty in (0.01, 100):  # the least and the most
        for how in (0.0, 1e-300, 1e-30, 1e-7, 1.0):
            assert choose(large, Sampling(temperature=how, repetition_penalty=penalty), 0.5, [0, 1]) == 0


def test_random_numbers_depend_on_seed_sample_and_place():
    drawn = [uniform(seed, choice, place) for seed in range(12) for choice in range(12) for place in range(12)]
    assert len(set(drawn)) == 12**3 and min(drawn) >= 0 and max(drawn) < 1
    assert abs(np.mean(drawn) - 0.5) < 0.03 and abs(np.var(drawn) - 1 / 12) < 0.01
    assert uniform(3, 2, 1) == uniform(3, 2, 1) and 0 <= uniform(2**64 - 1, 5, 10**6) < 1


def test_likelihood_has_ordered_alternatives():
    scores = np.array([0.5, 3.0, -2.0, 3.0, 1.0], np.float32)
    expected = np.log(np.exp(scores.astype(float)) / np.exp(scores.astype(float)).sum())
    found = likelihood(scores, 2, 3)
    assert found.logprob == pytest.approx(expected[2], abs=1e-6)
    assert [token for token, _ in found.alternatives] == [1, 3, 4]
    np.testing.assert_allclose([p for _, p in found.alternatives], expected[[1, 3, 4]], atol=1e-6)
    assert likelihood(scores, 0, 0).alternatives == [] and len(likelihood(scores, 0, 99).alternatives) == 5


def test_invalid_sampling_is_rejected():
    impossible = {
        "temperature": (-1, float("nan"), float("inf")),
        "top_k": (-1,),
        "top_p": (0, 1.1, float("nan")),
        "min_p": (-0.1, 1.1, float("nan")),
        "repetition_penalty": (0, -1, 1e-40, 0.0099, 100.1, float("inf"), float("nan")),
        "seed": (-1, 1 << 64),
    }
    for name, value in [(name, value) for name, values in impossible.items() for value in values]:
        with pytest.raises(UsageError, match=name):
            Request(**{name: value})


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

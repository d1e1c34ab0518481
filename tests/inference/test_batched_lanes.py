"""Lanes that decode all sequences in one pass, on the reference's operations, beside a pass for each."""

from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.base.errors import NonFiniteError
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.slots import Choice, Feed
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding.batched import BatchedSlots, Likeliest, _rounded

from models import VARIANTS, build

KERNELS = [lambda: Kernels(), lambda: CpuKernels("float64", 2)]


def same(config, kernels=None):
    """Both kinds of lanes of one model."""
    model = build(config, kernels or Kernels())
    return BatchedSlots(model, 5), PlainSlots(model, 5)


def poison(lanes):
    """What was never written is never read."""
    lanes._cache[...] = np.nan


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", VARIANTS)
def test_scores_are_those_of_a_pass_for_each(kind, kernels):
    """Prompts, tokens of one to four sequences in any order, a draft taken back, a lane begun anew."""
    config = VARIANTS[kind]
    batched, plain = same(config, kernels())
    poison(batched)
    t = np.random.default_rng(3).integers(0, config.vocab_size, 40).tolist()
    feeds = [
        [Feed(3, 0, t[:5], 1), Feed(1, 0, t[5:6], 1)],
        [Feed(3, 5, t[6:7], 1), Feed(1, 1, t[7:8], 1), Feed(0, 0, t[8:14], 0)],
        [Feed(0, 6, t[14:15], 1), Feed(4, 0, t[15:22], 7), Feed(3, 6, t[22:23], 1), Feed(1, 2, t[23:24], 1)],
        [Feed(4, 4, t[24:25], 1), Feed(1, 3, t[25:26], 1), Feed(0, 7, t[26:27], 1), Feed(3, 7, t[27:28], 1)],
        [Feed(3, 0, t[28:33], 2), Feed(4, 5, t[33:34], 1)],
    ]
    for work in feeds:
        found, expected = batched.feed(work), plain.feed(work)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["modern", "gpt2"])
def test_a_copy_and_a_shift_go_on_like_those_of_the_reference(kind):
    batched, plain = same(VARIANTS[kind])
    poison(batched)
    t = np.random.default_rng(4).integers(0, 13, 14).tolist()
    for lanes in (batched, plain):
        lanes.feed([Feed(2, 0, t[:7], 0)])
        lanes.copy(2, 0, 6)
        if lanes.can_drop:
            lanes.drop(2, 3, 4)
    start = 4 if plain.can_drop else 7
    work = [Feed(2, start, t[7:8], 1), Feed(0, 6, t[8:9], 1)]
    np.testing.assert_allclose(batched.feed(work), plain.feed(work), rtol=0, atol=1e-11)


def test_the_last_positions_of_the_context_are_filled():
    """Rows that a prompt is rounded up by have no room there."""
    config = VARIANTS["modern"]
    batched, plain = same(config)
    t = np.random.default_rng(5).integers(0, 13, config.seq_len).tolist()
    for cut in (config.seq_len, config.seq_len - 1, 6):
        for work in ([Feed(1, 0, t[:cut], 1)], [Feed(1, cut, t[cut:], len(t) - cut)] if cut < len(t) else []):
            np.testing.assert_allclose(batched.feed(work), plain.feed(work), rtol=0, atol=1e-11)


def test_what_does_not_fit_is_refused():
    batched, _ = same(VARIANTS["modern"])
    for wrong in ([Feed(5, 0, [1], 1)], [Feed(0, batched.length, [1], 1)], [Feed(0, 0, [1], 2)]):
        with pytest.raises(ValueError, match="does not fit"):
            batched.feed(wrong)
    with pytest.raises(ValueError, match="twice"):
        batched.feed([Feed(0, 0, [1], 1), Feed(0, 1, [2], 1)])


def test_rows_have_few_sizes():
    assert {_rounded(n) for n in range(1, 201)} == {1, 2, 3, 4, 8, 16, 32, 64, 128, 192, 256}
    assert all(n <= _rounded(n) < max(2 * n, n + 64) for n in range(1, 999))


HOW = [
    {},
    {"logprobs": 3},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.7, "logprobs": 9},
    {"temperature": 1.1, "top_k": 6, "min_p": 0.2},
    {"temperature": 1.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.6, "logprobs": 2},
    {"temperature": 1.2, "min_p": 0.3, "logprobs": 0},
    {"temperature": 1.2, "min_p": 0.1, "top_p": 0.8},
    {"temperature": 1.2, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.5},
    {"lookup": 4},
    {"logprobs": 2, "prompt_logprobs": True},
]


@pytest.mark.parametrize("kind", ["modern", "gpt2"])
def test_requests_are_answered_as_by_a_pass_for_each(kind):
    """All kinds of choice side by side, more samples than lanes, windows that slide and shift."""
    random = np.random.default_rng(7)
    requests = []
    for i, how in enumerate(HOW):
        prompt = random.integers(0, 13, 1 + i % 6).tolist()
        overflow = "shift" if i % 3 == 1 else "slide"
        requests.append(Request(prompt=prompt, max_new_tokens=14, n=1 + i % 3, seed=i, overflow=overflow, **how))
    batched, plain = (complete(Engine(lanes, chunk=4), requests) for lanes in same(VARIANTS[kind]))
    for how, found, expected in zip(HOW, batched, plain, strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert mine.tokens == other.tokens, how
            for a, b in zip(mine.likelihoods or (), other.likelihoods or (), strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-9), how
                assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives], how


def test_only_what_is_asked_for_leaves_the_device():
    """The likeliest where they are enough, beside all scores where they are not."""
    batched, plain = same(VARIANTS["modern"])
    three, one = (Choice(Sampling(), 0.0, count) for count in (3, 1))
    work = [Feed(0, 0, [1], 1, choice=three), Feed(1, 0, [2], 1), Feed(2, 0, [3], 1, choice=one)]
    first, whole, last = batched.feed(work)
    expected = plain.feed([each._replace(choice=None) for each in work])
    np.testing.assert_allclose(whole, expected[1], atol=1e-11)
    for row, scores in ((first, expected[0]), (last, expected[2])):
        assert isinstance(row, Likeliest) and len(row.tokens) == 8
        assert row.tokens.tolist() == np.argsort(-scores, kind="stable")[:8].tolist()
        assert row.log_sum == pytest.approx(np.log(np.exp(scores).sum()), abs=1e-11)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 3.0])
@pytest.mark.parametrize(
    "how", [{}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.99, "min_p": 0.001}, {"top_p": 0.7}], ids=str
)
def test_what_64_tokens_do_not_reach_is_chosen_by_all_scores(how, temperature, monkeypatch):
    """Cold, the likeliest reach; warm, all scores of a row are fetched, but not to draw from them."""
    config = replace(VARIANTS["modern"], vocab_size=300)
    requests = [
        Request(prompt=[1 + i, 2], max_new_tokens=20, temperature=temperature, seed=i, logprobs=i, **how)
        for i in range(4)
    ]
    batched, plain = same(config)
    fetched, whole = [], BatchedSlots._whole
    monkeypatch.setattr(BatchedSlots, "_whole", lambda self, i: (fetched.append(i), whole(self, i))[1])
    for found, expected in zip(complete(Engine(batched), requests), complete(Engine(plain), requests), strict=True):
        assert found[0].tokens == expected[0].tokens
        for a, b in zip(found[0].likelihoods, expected[0].likelihoods, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
    if not how or temperature == 0.05:
        assert not fetched
    elif temperature == 3.0:
        assert fetched


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_a_broken_model_is_found_where_only_the_likeliest_are_looked_at(how):
    model = build(VARIANTS["modern"], Kernels())
    lanes = BatchedSlots(model, 2)
    engine = Engine(lanes)
    engine.submit(Request(prompt=[1, 2], max_new_tokens=5, **how))
    engine.step()
    model.head[-model.config.padded_vocab + 3] = np.inf
    with pytest.raises(NonFiniteError):
        engine.step()

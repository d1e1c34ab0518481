"""Batched slots choose tokens on the device: as from all scores, of which no more than needed are fetched."""

from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.base.errors import NonFiniteError
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.slots import Choice, Feed
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding.batched import BatchedSlots, TopKLogits, rounded_rows

from models import VARIANTS, build


class Fetching(Kernels):
    """Counts the rows of scores that are fetched one by one."""

    fetched = 0

    def to_host(self, array):
        self.fetched += array.ndim == 1 and len(array) > 64
        return super().to_host(array)


def test_rows_have_few_sizes():
    assert {rounded_rows(n) for n in range(1, 201)} == {1, 2, 3, 4, 8, 16, 32, 64, 128, 192, 256}
    assert all(n <= rounded_rows(n) < max(2 * n, n + 64) for n in range(1, 999))


def test_only_the_likeliest_leave_the_device_where_they_are_enough():
    model = build(VARIANTS["modern"], Kernels())
    batched, plain = BatchedSlots(model, 5), PlainSlots(model, 5)
    three, one = (Choice(Sampling(), 0.0, count) for count in (3, 1))
    work = [Feed(0, 0, [1], 1, choice=three), Feed(1, 0, [2], 1), Feed(2, 0, [3], 1, choice=one)]
    first, whole, last = batched.feed(work)
    expected = plain.feed(work)  # which ignore the choice
    np.testing.assert_allclose(whole, expected[1], atol=1e-11)
    for row, scores in ((first, expected[0]), (last, expected[2])):
        assert isinstance(row, TopKLogits) and len(row.tokens) == 8
        assert row.tokens.tolist() == np.argsort(-scores, kind="stable")[:8].tolist()
        assert row.log_sum == pytest.approx(np.log(np.exp(scores).sum()), abs=1e-11)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 3.0])
@pytest.mark.parametrize(
    "how", [{}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.99, "min_p": 0.001}, {"top_p": 0.7}], ids=str
)
def test_tokens_beyond_the_64_likeliest_are_chosen_by_all_scores(how, temperature):
    """Cold, the likeliest reach; warm, all scores of a row are fetched, but not to draw from them."""
    config, kernels = replace(VARIANTS["modern"], vocab_size=300), Fetching()
    requests = [
        Request(prompt=[1 + i, 2], max_new_tokens=20, temperature=temperature, seed=i, logprobs=i, **how)
        for i in range(4)
    ]
    model = build(config, kernels)
    found, expected = (complete(Engine(slots(model, 5)), requests) for slots in (BatchedSlots, PlainSlots))
    for (mine,), (other,) in zip(found, expected, strict=True):
        assert mine.tokens == other.tokens
        for a, b in zip(mine.likelihoods, other.likelihoods, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
    if not how or temperature == 0.05:
        assert not kernels.fetched
    elif temperature == 3.0:
        assert kernels.fetched


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_a_broken_model_is_found_where_only_the_likeliest_are_looked_at(how):
    model = build(VARIANTS["modern"], Kernels())
    engine = Engine(BatchedSlots(model, 2))
    engine.submit(Request(prompt=[1, 2], max_new_tokens=5, **how))
    engine.step()
    model.head[-model.config.padded_vocab + 3] = np.inf
    with pytest.raises(NonFiniteError):
        engine.step()

"""Lanes: scores with a cache against the plain forward pass, side by side, copied, rewound."""

from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.comm.resources import Memory
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate import engine_setup
from distgpt.core.generate.engine_setup import CACHE_BYTES, rehearse, slot_bytes, slots_that_fit
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.slots import Feed
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from threadranks import on_all_ranks

from models import VARIANTS, build


def plain_scores(model, tokens):
    """Scores after each token, by the training forward pass."""
    work = Pass(model, 1, len(tokens), training=False)
    hidden = work.forward(model.kernels.integers(tokens))
    scores = model.kernels.zeros(len(tokens), model.config.padded_vocab)
    work.logits(scores, hidden)
    return scores[:, : model.config.vocab_size]


@pytest.mark.parametrize("kernels", [lambda: Kernels(), lambda: CpuKernels("float64", 2)])
def test_cached_scores_equal_the_forward_pass(kernels):
    """A prompt in pieces, single tokens, and a draft of which all is scored, beside another sequence."""
    kernels = kernels()
    for kind, config in VARIANTS.items():
        model = build(config, kernels)
        lanes = PlainSlots(model, 3)
        one, other = np.random.default_rng(3).integers(0, config.vocab_size, (2, 9)).tolist()
        feeds = [
            [Feed(2, 0, one[:3], 0), Feed(0, 0, other[:2], 1)],
            [Feed(0, 2, other[2:3], 1), Feed(2, 3, one[3:5], 1)],
            [Feed(2, 5, one[5:6], 1)],
            [Feed(2, 6, one[6:], 3), Feed(0, 3, other[3:4], 1)],
        ]
        (a,), (b, c), (d,), (e, f, g, h) = [lanes.feed(work) for work in feeds]
        expected, beside = plain_scores(model, one), plain_scores(model, other)
        found = np.stack([c, d, e, f, g, a, b, h])
        wanted = np.concatenate([expected[4:], beside[1:4]])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11, err_msg=kind)


def test_a_copy_continues_like_its_source_and_a_draft_can_be_taken_back():
    model = build(VARIANTS["modern"], CpuKernels("float64", 2))
    lanes, tokens = PlainSlots(model, 2), [1, 2, 3, 4, 5]
    lanes.feed([Feed(0, 0, tokens, 0)])
    lanes.copy(0, 1, 3)
    lanes.feed([Feed(0, 3, [9, 8, 7], 3)])  # a draft, none of which stays
    for lane in (0, 1):
        again = lanes.feed([Feed(lane, 3, tokens[3:], 2)])
        np.testing.assert_allclose(again, plain_scores(model, tokens)[3:], atol=1e-11)


def test_there_are_as_many_lanes_as_their_memory_allows():
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


def test_a_rehearsal_fits_any_context():
    for kind, seq_len in (("gpt2", 1), ("gpt2", 2), ("grouped queries", 9)):
        rehearse(build(replace(VARIANTS[kind], seq_len=seq_len), CpuKernels("float32", 1)))

"""Decoding with a cache against the plain forward pass, the sliding window, and the choice of tokens."""

from dataclasses import replace

import numpy as np
import pytest
from test_model import VARIANTS, build

from distgpt.comm.serial import SerialComm
from distgpt.errors import UsageError
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.model.generate import Decoder, Sampling, choose, generate
from distgpt.model.passes import Pass


def plain_scores(model, tokens):
    """Scores after the last token by the training forward pass over the last seq_len tokens."""
    window = tokens[-model.config.seq_len :]
    work = Pass(model, 1, len(window), training=False)
    hidden = work.hidden(model.kernels.integers(window))
    scores = model.kernels.zeros(len(window), model.config.padded_vocab)
    work.scores(scores, hidden)
    return scores[-1, : model.config.vocab_size]


@pytest.mark.parametrize("kernels", [lambda: ReferenceKernels(), lambda: CpuKernels("float64", 2)])
def test_cached_scores_equal_the_forward_pass_even_past_the_context(kernels):
    kernels = kernels()
    for kind, config in VARIANTS.items():
        model = build(config, kernels)
        decoder, seen = Decoder(model), []
        tokens = np.random.default_rng(3).integers(0, config.vocab_size, 16).tolist()
        for piece in (tokens[:3], tokens[3:4], tokens[4:6], *([t] for t in tokens[6:])):
            seen += piece
            expected = plain_scores(model, seen)
            np.testing.assert_allclose(decoder.feed(piece), expected, rtol=0, atol=1e-11, err_msg=kind)
        assert len(seen) > config.seq_len


def test_a_long_prompt_goes_through_the_blocked_kernels_alike_and_is_cut_to_its_end():
    for seq_len, pieces in ((300, (150, 50)), (9, (30,))):
        model = build(replace(VARIANTS["modern"], seq_len=seq_len), CpuKernels("float64", 2))
        tokens = np.random.default_rng(4).integers(0, 13, sum(pieces)).tolist()
        decoder = Decoder(model)
        *_, scores = [decoder.feed(tokens[sum(pieces[:i]) :][:length]) for i, length in enumerate(pieces)]
        np.testing.assert_allclose(scores, plain_scores(model, tokens), atol=1e-11)


def test_greedy_generation_takes_the_likeliest_token_and_sampling_is_repeatable_by_seed():
    model = build(VARIANTS["gpt2"], CpuKernels("float64", 1))
    seen = [1, 2, 3]
    for token in list(generate(model, seen.copy(), 12, Sampling(), SerialComm())):
        assert token == plain_scores(model, seen).argmax()
        seen.append(token)
    assert len(seen) == 15

    def drawn(seed):
        return list(generate(model, [1], 30, Sampling(temperature=1.0, seed=seed), SerialComm()))

    assert drawn(1) == drawn(1) != drawn(2)


def test_choice_follows_the_softmax_whose_tail_top_k_and_top_p_cut():
    chances = np.array([0.1, 0.6, 0.3])
    for how, expected in (
        ({}, chances),
        ({"temperature": 0.5}, chances**2 / (chances**2).sum()),
        ({"top_k": 2}, [0, 2 / 3, 1 / 3]),
        ({"top_p": 0.7}, [0, 2 / 3, 1 / 3]),
        ({"top_p": 0.5}, [0, 1, 0]),
    ):
        sampling, random = Sampling(**{"temperature": 1.0, **how}), np.random.default_rng(0)
        drawn = [choose(np.log(chances), sampling, random) for _ in range(4000)]
        found = np.bincount(drawn, minlength=3) / 4000
        np.testing.assert_allclose(found, expected, atol=0.03, err_msg=str(how))
        assert not found[np.equal(expected, 0)].any(), how


def test_impossible_sampling_and_an_empty_prompt_are_refused():
    impossible = {"temperature": (-1, float("nan")), "top_k": (-1,), "top_p": (0, 1.1)}
    for name, value in [(name, value) for name, values in impossible.items() for value in values]:
        with pytest.raises(UsageError, match=name):
            Sampling(**{name: value})
    model = build(VARIANTS["gpt2"], CpuKernels("float64", 1))
    with pytest.raises(UsageError, match="prompt"):
        next(generate(model, [], 1, Sampling(), SerialComm()))

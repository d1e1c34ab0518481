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


def test_a_prompt_longer_than_the_context_is_cut_to_its_end():
    model = build(VARIANTS["modern"], CpuKernels("float64", 1))
    tokens = np.random.default_rng(4).integers(0, 13, 30).tolist()
    np.testing.assert_allclose(Decoder(model).feed(tokens), plain_scores(model, tokens), atol=1e-11)


def test_a_long_prompt_goes_through_the_blocked_kernels_alike():
    config = replace(VARIANTS["modern"], seq_len=300)
    model = build(config, CpuKernels("float64", 2))
    tokens = np.random.default_rng(5).integers(0, 13, 200).tolist()
    decoder = Decoder(model)
    decoder.feed(tokens[:150])
    np.testing.assert_allclose(decoder.feed(tokens[150:]), plain_scores(model, tokens), atol=1e-11)


def test_greedy_generation_takes_the_likeliest_token_each_time():
    model = build(VARIANTS["gpt2"], CpuKernels("float64", 1))
    new = list(generate(model, [1, 2, 3], 12, Sampling(), SerialComm()))
    seen = [1, 2, 3]
    for token in new:
        assert token == plain_scores(model, seen).argmax()
        seen.append(token)


def test_sampling_is_repeatable_by_seed():
    model = build(VARIANTS["gpt2"], CpuKernels("float64", 1))
    runs = [
        list(generate(model, [1], 30, Sampling(temperature=1.0, seed=seed), SerialComm()))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def frequencies(logits, sampling, draws=4000):
    random = np.random.default_rng(0)
    counts = np.bincount([choose(logits, sampling, random) for _ in range(draws)], minlength=len(logits))
    return counts / draws


def test_choice_follows_the_softmax():
    logits = np.log(np.array([0.1, 0.6, 0.3]))
    np.testing.assert_allclose(frequencies(logits, Sampling(temperature=1.0)), [0.1, 0.6, 0.3], atol=0.03)
    sharper = np.array([0.1, 0.6, 0.3]) ** 2
    np.testing.assert_allclose(
        frequencies(logits, Sampling(temperature=0.5)), sharper / sharper.sum(), atol=0.03
    )


def test_top_k_and_top_p_cut_the_tail():
    logits = np.log(np.array([0.1, 0.6, 0.3]))
    top_k = frequencies(logits, Sampling(temperature=1.0, top_k=2))
    np.testing.assert_allclose(top_k, [0, 2 / 3, 1 / 3], atol=0.03)
    assert frequencies(logits, Sampling(temperature=1.0, top_p=0.5))[1] == 1
    np.testing.assert_allclose(frequencies(logits, Sampling(1.0, top_p=0.7)), [0, 2 / 3, 1 / 3], atol=0.03)


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}],
)
def test_impossible_sampling_is_refused(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)


def test_an_empty_prompt_is_refused():
    model = build(VARIANTS["gpt2"], CpuKernels("float64", 1))
    with pytest.raises(UsageError, match="prompt"):
        next(generate(model, [], 1, Sampling(), SerialComm()))

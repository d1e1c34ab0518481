"""Adapters: gradients by the chain rule and by differences, and frozen weights."""

import numpy as np
import pytest
from adapted import adapted, expected, gradients, merged
from distgpt.core.cpu.fused import flat
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels

from models import BASE, VARIANTS, batch, check_by_differences, plain_logits


def close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        distance = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert distance < tolerance, (name, distance)


@pytest.mark.parametrize(
    "kernels",
    [Kernels("float64"), pytest.param(CpuKernels("float64", 2), marks=pytest.mark.ci)],
    ids=["plain", "fused"],
)
def test_gradients_follow_the_chain_rule(kernels):
    for kind, config in VARIANTS.items():
        tokens, targets = batch(config, 3, 7)
        for matrices in ("all", "q,v,up") if kind in ("gpt2", "modern", "grouped queries") else ("all",):
            model = adapted(config, kernels, matrices)
            wanted, loss = expected(model, Kernels("float64"), tokens, targets)
            for recompute in ("none", "mlp", "block"):
                found, same = gradients(model, tokens, targets, recompute)
                close(found, wanted, 1e-11)
                assert same == pytest.approx(loss, rel=1e-12), kind


@pytest.mark.parametrize("kernels, limit", [(CpuKernels("float32", 2), 1e-4), (Bfloat16Kernels(2), 0.12)])
def test_gradients_in_training_types(kernels, limit):
    for kind in ("gpt2", "modern", "a head size of its own"):
        tokens, targets = batch(VARIANTS[kind], 4, 9)
        model = adapted(VARIANTS[kind], kernels)
        wanted, loss = expected(model, Kernels("float64"), tokens, targets, n_seq=4)
        found, same = gradients(model, tokens, targets, n_seq=4)
        close(found, wanted, limit)
        assert same == pytest.approx(loss, rel=limit / 10), kind


def test_lora_gradients_match_central_differences():
    model, examples = adapted(BASE, Kernels("float64")), batch(BASE, 3, 7)
    check_by_differences(model, gradients(model, *examples)[0], *examples)


def test_fresh_adapters_keep_the_model():
    kernels = Bfloat16Kernels(1)
    model = adapted(BASE, kernels)
    model.initialise(7)
    assert not any(np.any(x) for name, x in model.weights.items() if name.endswith("lora_b"))
    assert all(np.any(x) for name, x in model.weights.items() if name.endswith("lora_a"))
    tokens, _ = batch(BASE, 1, 9)
    work, scores = Pass(model, 1, 9, training=False), kernels.zeros(9, BASE.padded_vocab)
    work.logits(scores, work.forward(tokens))
    wanted = plain_logits(BASE, merged(model), tokens)
    got = kernels.to_host(scores)[:, : BASE.vocab_size]
    np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max())
    model.make_gradients()
    assert set(model.grads) == set(model.weights) == {spec.name for spec in model.layout.specs}
    assert model.layout.elements < model.frozen.layout.elements / 3


def test_low_rank_addition_is_unbiased():
    """Rounding to the nearest bfloat16 would drop this addition."""
    kernels, rng = Bfloat16Kernels(2), np.random.default_rng(0)
    w, b, a, y = (kernels.zeros(*shape) for shape in ((64, 512), (64, 2), (2, 512), (64, 512)))
    kernels.put(w, rng.uniform(1, 2, w.shape))
    kernels.put(b, rng.standard_normal(b.shape))
    kernels.put(a, rng.standard_normal(a.shape))
    kernels.add_low_rank(y, w, b, a, 1e-4)
    exact = kernels.to_host(b) @ kernels.to_host(a)
    added = (kernels.to_host(y) - kernels.to_host(w)) * 1e4
    assert (added * exact).sum() == pytest.approx((exact**2).sum(), rel=0.1)


def test_low_rank_addition_is_identical_for_any_threads(monkeypatch):
    rng, found = np.random.default_rng(0), []
    host = [rng.standard_normal(shape) for shape in ((70, 40), (70, 3), (3, 40))]
    for threads, rows in ((1, 1000), (1, 8), (2, 8)):
        monkeypatch.setattr(flat, "SUMS_BYTES", 40 * 4 * rows)
        monkeypatch.setattr(flat, "LEAST_ROWS", 1)
        kernels = Bfloat16Kernels(threads)
        w, b, a = (kernels.zeros(*each.shape) for each in host)
        for array, each in zip((w, b, a), host, strict=True):
            kernels.put(array, each)
        y = np.zeros_like(w)
        kernels.add_low_rank(y, w, b, a, 0.5)
        found.append(y)
    assert found[0].any() and all(np.array_equal(found[0], each) for each in found)

"""Models against formulas: traces, and a separate microgpt in plain Python."""

import distgpt
import microgpt_plain_python as plain
import numpy as np
import pytest
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels

from models import VARIANTS, plain_trace

TOKENS = np.random.default_rng(0).integers(0, 13, (4, 7))


@pytest.fixture(params=["gpt2", "modern", "microgpt", "grouped queries", "windows"])
def model(request):
    return distgpt.init(VARIANTS[request.param], seed=3, dtype="float64")


def test_trace_follows_the_formulas(model):
    trace, c = model.trace(TOKENS), model.config
    assert {x.shape for x in trace.hidden} == {(4, 7, c.n_embd)}
    for i, tokens in enumerate(TOKENS):
        logits, hidden, weights = plain_trace(c, model.parameters(), tokens)
        np.testing.assert_allclose(trace.logits[i], logits, atol=1e-12)
        np.testing.assert_allclose([x[i] for x in trace.hidden], hidden, atol=1e-10)
        found = [x[i] for x in trace.attention]
        np.testing.assert_allclose(found, np.reshape(weights, (c.n_layer, c.n_head, 7, 7)), atol=1e-12)
    np.testing.assert_allclose(trace.logits, model.logits(TOKENS), atol=1e-12)


def test_single_sequence_needs_no_batch_axis(model):
    one, many = model.trace(TOKENS[0]), model.trace(TOKENS)
    np.testing.assert_allclose(one.logits, many.logits[0], atol=1e-12)
    np.testing.assert_allclose(one.attention[1], many.attention[1][0], atol=1e-12)
    np.testing.assert_allclose(model.logits(TOKENS[0]), one.logits, atol=1e-12)
    assert model.logits(TOKENS[0].tolist()).shape == (7, 13)
    assert model.loss(TOKENS[0], TOKENS[1]) == model.loss(TOKENS[:1], TOKENS[1:2])
    gradients = (model.gradients(*pair)["wte"] for pair in (TOKENS[:2], (TOKENS[:1], TOKENS[1:2])))
    np.testing.assert_array_equal(*gradients)


def test_model_repr():
    model = distgpt.init(VARIANTS["gpt2"], dtype="float64")
    for part in ("2 layers, 3 heads, width 24, context 9", "float64"):
        assert part in repr(model)
    assert "(4, 3, 7, 7)" in repr(model.trace(TOKENS))


def test_tiny_temperatures_are_greedy():
    model = distgpt.init(VARIANTS["gpt2"], dtype="float64")
    greedy = model.generate([1, 2], 5, temperature=0)
    assert model.generate([1, 2], 5) == model.generate([1, 2], 5, temperature=0.8) != greedy
    for temperature in (1e-300, 1e-30, 1e-7, 1e-6):
        assert model.generate([1, 2], 5, temperature=temperature) == greedy


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_embd": 12, "n_head": 3}])
def test_logits_and_losses_agree(changes):
    tokens = [26, *(ord(letter) - ord("a") for letter in "helena"), 26]  # 26 for the boundary at both ends
    for kernels in (Kernels("float64"), CpuKernels("float64", 1)):
        model = Model(Architecture(preset("microgpt", changes).model), kernels)
        assert changes or model.layout.size == 4192  # published size
        model.initialise(3)
        weights = {name: np.array(values).tolist() for name, values in model.weights.items()}
        shape = plain.Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)
        work = Pass(model, 1, len(tokens) - 1, training=False)
        inputs, targets = (kernels.integers(side) for side in (tokens[:-1], tokens[1:]))
        scores, loss = kernels.zeros(len(inputs), model.config.padded_vocab), kernels.zeros(1)
        work.logits(scores, work.forward(inputs))
        expected = list(plain.logits(weights, shape, tokens[:-1]))
        np.testing.assert_allclose(scores, expected, rtol=1e-10, atol=1e-10)
        work.loss(loss, inputs, targets)
        assert float(loss[0]) == pytest.approx(plain.mean_loss(weights, shape, [tokens]), rel=1e-10)

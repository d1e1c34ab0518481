"""The core against a microgpt of plain Python numbers: two ways of computing that share no line."""

import ast
from pathlib import Path

import numpy as np
import pytest

from distgpt.config import TrainConfig
from distgpt.config.presets import preset
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.measure.bench import scalar
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Pass

BACKENDS = {"reference": lambda: ReferenceKernels("float64"), "cpu": lambda: CpuKernels("float64", 1)}
NAMES = "ed jo al bo ty io an ki em lu"  # short ones, as plain Python is slow
STEPS = 20
NARROW = {"n_embd": 8}  # to train in


def tokens_of(name):
    """Letters, and 26 for the boundary at both ends, as in microgpt."""
    return [26, *(ord(letter) - ord("a") for letter in name), 26]


def started(kernels, **changes):
    run = preset("microgpt", changes)
    model = Model(run.model, kernels)
    model.initialise(3)
    return model


def copied(model):
    return {name: np.array(values).tolist() for name, values in model.weights.items()}


def shape_of(model):
    return scalar.Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)


def passing(model, tokens, training):
    work = Pass(model, 1, len(tokens) - 1, training)
    return work, *(model.kernels.integers(side) for side in (tokens[:-1], tokens[1:]))


@pytest.fixture(params=BACKENDS)
def kernels(request):
    return BACKENDS[request.param]()


def test_microgpt_has_its_published_size():
    assert started(BACKENDS["reference"]()).layout.size == 4192


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_embd": 12, "n_head": 3}])
def test_logits_agree(kernels, changes):
    model, tokens = started(kernels, **changes), tokens_of("charlotte")
    work, inputs, _ = passing(model, tokens, training=False)
    found = model.kernels.zeros(len(inputs), model.config.padded_vocab)
    work.scores(found, work.hidden(inputs))
    expected = list(scalar.logits(copied(model), shape_of(model), tokens[:-1]))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_embd": 12, "n_head": 3}])
def test_losses_and_gradients_agree(kernels, changes):
    model, tokens = started(kernels, **changes), tokens_of("mila")
    work, inputs, targets = passing(model, tokens, training=True)
    _ = model.grads
    work.loss_and_gradients(inputs, targets, 1.0, accumulate=False)
    loss, slopes = scalar.gradients(copied(model), shape_of(model), tokens)
    assert float(model.grads.extra[0]) == pytest.approx(loss, rel=1e-10)
    for name, expected in slopes.items():
        np.testing.assert_allclose(model.grads[name], expected, rtol=1e-10, atol=1e-10, err_msg=name)


def test_floats_and_numbers_give_the_same_loss():
    model = started(BACKENDS["reference"]())
    weights, tokens = copied(model), tokens_of("mia")
    with_trail, _ = scalar.gradients(weights, shape_of(model), tokens)
    assert scalar.mean_loss(weights, shape_of(model), [tokens]) == pytest.approx(with_trail, rel=1e-13)


def test_gradients_are_central_differences():
    model = started(BACKENDS["reference"]())
    weights, shape, tokens = copied(model), shape_of(model), tokens_of("ava")
    _, slopes = scalar.gradients(weights, shape, tokens)
    for name, i, j in (("wte", 26, 3), ("wpe", 1, 0), ("blocks.0.attn.qkv.w", 20, 5), ("head.w", 0, 7)):
        start, ends = weights[name][i][j], []
        for moved in (start + 1e-6, start - 1e-6):
            weights[name][i][j] = moved
            ends.append(scalar.mean_loss(weights, shape, [tokens]))
        weights[name][i][j] = start
        assert slopes[name][i][j] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9), name


@pytest.fixture(scope="module")
def trained():
    """What plain Python learns from 20 names, and the weights it began with."""
    model = started(BACKENDS["reference"](), **NARROW)
    names = (NAMES.split() * 2)[:STEPS]
    weights = copied(model)
    losses = scalar.train(weights, shape_of(model), [tokens_of(name) for name in names], scalar.Adam(STEPS))
    return names, losses, weights


def test_training_agrees(kernels, trained):
    names, expected_losses, expected = trained
    recipe = preset("microgpt").train
    config = TrainConfig(
        steps=STEPS,
        lr=recipe.lr,
        schedule=recipe.schedule,
        warmup=recipe.warmup,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        eps=recipe.eps,
    )
    model, losses = started(kernels, **NARROW), []
    model.train()
    optimizer = AdamW(model, config)
    for step, name in enumerate(names):
        work, inputs, targets = passing(model, tokens_of(name), training=True)
        work.loss_and_gradients(inputs, targets, 1.0, accumulate=False)
        losses.append(float(model.grads.extra[0]))
        optimizer.step(step, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-8)
    assert losses[-1] < losses[0]
    for name, values in expected.items():
        np.testing.assert_allclose(model.weights[name], values, rtol=1e-8, atol=1e-8, err_msg=name)


def test_it_is_plain_python():
    tree = ast.parse(Path(scalar.__file__).read_text())
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert used == {"__future__", "collections.abc", "dataclasses", "math", "typing"}

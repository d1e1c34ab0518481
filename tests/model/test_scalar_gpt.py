"""The core against a microgpt of plain Python numbers: two implementations that share no line."""

import ast
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import microgpt_plain_python as plain
import numpy as np
import pytest

from distgpt.config.presets import preset
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Pass

BACKENDS = {"reference": lambda: ReferenceKernels("float64"), "cpu": lambda: CpuKernels("float64", 1)}
NAMES = "ed jo al bo ty io an ki em lu"  # short ones, as plain Python is slow
STEPS = 10
NARROW = {"n_embd": 8}  # to train in


TRAIL = []  # all numbers, in the order in which they were computed


class Number:
    """A value, the numbers it was computed from, and its derivative by each of these."""

    def __init__(self, value, *sources):
        self.value, self.sources, self.gradient = value, sources, 0.0
        TRAIL.append(self)

    def __float__(self):
        return self.value

    def __add__(self, other):
        if isinstance(other, Number):
            return Number(self.value + other.value, (self, 1.0), (other, 1.0))
        return Number(self.value + other, (self, 1.0))

    def __mul__(self, other):
        if isinstance(other, Number):
            return Number(self.value * other.value, (self, other.value), (other, self.value))
        return Number(self.value * other, (self, other))

    def __pow__(self, power):
        return Number(self.value**power, (self, power * self.value ** (power - 1)))

    def __sub__(self, other):
        return self + other * -1.0

    def exp(self):
        return Number(math.exp(self.value), (self, math.exp(self.value)))

    def log(self):
        return Number(math.log(self.value), (self, 1 / self.value))

    def relu(self):
        return Number(max(self.value, 0.0), (self, float(self.value > 0)))

    __radd__, __rmul__ = __add__, __mul__


def gradients(weights, shape, tokens):
    """The mean loss of one sequence, and its gradients by the names of the weights."""
    TRAIL.clear()
    numbers = {name: [[Number(x) for x in row] for row in rows] for name, rows in weights.items()}
    mean = plain.loss(numbers, shape, tokens) * (1 / (len(tokens) - 1))
    mean.gradient = 1.0
    for number in reversed(TRAIL):
        for source, derivative in number.sources:
            source.gradient += derivative * number.gradient
    return mean.value, {name: [[x.gradient for x in row] for row in rows] for name, rows in numbers.items()}


def trained_by_adam(weights, shape, sequences, lr=0.01, beta1=0.85, beta2=0.99, eps=1e-8):
    """One sequence a step, lr falling linearly to 0: the loss before each step. Changes the weights."""
    losses, m, v = [], defaultdict(float), defaultdict(float)
    for step, tokens in enumerate(sequences):
        mean, grads = gradients(weights, shape, tokens)
        losses.append(mean)
        for name, rows in weights.items():
            for i, j in np.ndindex(len(rows), len(rows[0])):
                at, g = (name, i, j), grads[name][i][j]
                m[at] = beta1 * m[at] + (1 - beta1) * g
                v[at] = beta2 * v[at] + (1 - beta2) * g * g
                first, second = m[at] / (1 - beta1 ** (step + 1)), v[at] / (1 - beta2 ** (step + 1))
                rows[i][j] -= lr * (1 - step / len(sequences)) * first / (math.sqrt(second) + eps)
    return losses


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
    return plain.Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)


def passing(model, tokens, training):
    work = Pass(model, 1, len(tokens) - 1, training)
    return work, *(model.kernels.integers(side) for side in (tokens[:-1], tokens[1:]))


@pytest.fixture(params=BACKENDS)
def kernels(request):
    return BACKENDS[request.param]()


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_embd": 12, "n_head": 3}])
def test_logits_losses_and_gradients_agree(kernels, changes):
    model, tokens = started(kernels, **changes), tokens_of("helena")
    work, inputs, targets = passing(model, tokens, training=True)
    scores = model.kernels.zeros(len(inputs), model.config.padded_vocab)
    work.scores(scores, work.hidden(inputs))
    expected = list(plain.logits(copied(model), shape_of(model), tokens[:-1]))
    np.testing.assert_allclose(scores, expected, rtol=1e-10, atol=1e-10)
    _ = model.grads
    work.loss_and_gradients(inputs, targets, 1.0, accumulate=False)
    loss, grads = gradients(copied(model), shape_of(model), tokens)
    assert float(model.grads.flags[0]) == pytest.approx(loss, rel=1e-10)
    for name, expected in grads.items():
        np.testing.assert_allclose(model.grads[name], expected, rtol=1e-10, atol=1e-10, err_msg=name)


def test_gradients_are_central_differences_of_the_loss_in_floats():
    model = started(BACKENDS["reference"]())
    assert model.layout.size == 4192  # as published
    weights, shape, tokens = copied(model), shape_of(model), tokens_of("ava")
    loss, grads = gradients(weights, shape, tokens)
    assert plain.mean_loss(weights, shape, [tokens]) == pytest.approx(loss, rel=1e-13)
    for name, i, j in (("wte", 26, 3), ("wpe", 1, 0), ("blocks.0.attn.qkv.w", 20, 5), ("head.w", 0, 7)):
        start, ends = weights[name][i][j], []
        for moved in (start + 1e-6, start - 1e-6, start):
            weights[name][i][j] = moved
            ends.append(plain.mean_loss(weights, shape, [tokens]))
        assert grads[name][i][j] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9), name


@pytest.fixture(scope="module")
def trained():
    """What plain Python learns from a few names, and the weights it began with."""
    model = started(BACKENDS["reference"](), **NARROW)
    names = NAMES.split()[:STEPS]
    weights = copied(model)
    losses = trained_by_adam(weights, shape_of(model), [tokens_of(name) for name in names])
    return names, losses, weights


def test_training_agrees(kernels, trained):
    names, expected_losses, expected = trained
    recipe = preset("microgpt").train
    config = replace(recipe, steps=STEPS)
    model, losses = started(kernels, **NARROW), []
    model.train()
    optimizer = AdamW(model, config)
    for step, name in enumerate(names):
        work, inputs, targets = passing(model, tokens_of(name), training=True)
        work.loss_and_gradients(inputs, targets, 1.0, accumulate=False)
        losses.append(float(model.grads.flags[0]))
        optimizer.step(step, 1.0)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-8)
    assert losses[-1] < losses[0]
    for name, values in expected.items():
        np.testing.assert_allclose(model.weights[name], values, rtol=1e-8, atol=1e-8, err_msg=name)


def test_it_is_plain_python():
    tree = ast.parse(Path(plain.__file__).read_text())
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert used == {"__future__", "collections.abc", "dataclasses", "math", "typing"}

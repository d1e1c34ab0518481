"""The core against a microgpt of plain Python numbers: two implementations that share no line."""

import ast
from pathlib import Path

import microgpt_plain_python as plain
import numpy as np
import pytest
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels


@pytest.mark.parametrize("changes", [{}, {"n_layer": 2, "n_embd": 12, "n_head": 3}])
def test_logits_and_losses_agree(changes):
    tokens = [26, *(ord(letter) - ord("a") for letter in "helena"), 26]  # 26 for the boundary at both ends
    for kernels in (Kernels("float64"), CpuKernels("float64", 1)):
        model = Model(Architecture(preset("microgpt", changes).model), kernels)
        assert changes or model.layout.size == 4192  # as published
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


def test_it_is_plain_python():
    tree = ast.parse(Path(plain.__file__).read_text())
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert used == {"__future__", "collections.abc", "dataclasses", "math", "typing"}

"""Activations: known values, and gradients against differences."""

import numpy as np
import pytest
from distgpt.core.config import MLPS
from distgpt.core.cpu.fused import activations as loops
from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import Affine
from distgpt.core.ops.kernels import Kernels

X = np.array([-3.0, -0.7, -1e-3, 1e-3, 0.4, 1.0, 2.5])
# At -0.7, 1 and 2.5; swiglu without its gate.
VALUES = {
    "gelu": (-0.169430, 0.841192, 2.484916),
    "relu": (0, 1, 2.5),
    "relu2": (0, 1, 6.25),
    "swiglu": (-0.232269, 0.731059, 2.310355),
}


@pytest.mark.parametrize("name", VALUES)
def test_activation_values(name):
    np.testing.assert_allclose(ACTIVATIONS[name].compute(X)[0][[1, 5, 6]], VALUES[name], atol=5e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_gradients_match_differences(name):
    step, compute = 1e-6, ACTIVATIONS[name].compute
    differences = (compute(X + step)[0] - compute(X - step)[0]) / (2 * step)
    np.testing.assert_allclose(compute(X)[1], differences, atol=1e-8)
    assert np.isnan(compute(np.array([np.nan]))[0])  # NaN reaches the loss


def test_gate_multiplies_by_right_half():
    k, w = Kernels(), np.eye(4)
    pre, y = k.zeros(1, 4), k.zeros(1, 2)
    k.linear_act(y, pre, np.array([[1.0, -0.7, 3.0, 10.0]]), Affine(w, None), "swiglu")
    np.testing.assert_allclose(y, [[3 * 0.731059, -2.32269]], atol=5e-6)


def test_activations_have_all_loops():
    assert set(MLPS) == {*loops.LOOPS} == {*loops.NUMBERS}

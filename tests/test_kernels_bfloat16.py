"""The CPU's bfloat16 kernels against the reference, with crews of one and of three."""

import numpy as np
import pytest
from operations import *  # noqa: F403

from distgpt.config import ModelConfig, TrainConfig
from distgpt.kernels.cpu import Bfloat16Kernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.model.passes import Pass


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def both(request):
    return ReferenceKernels("float64"), Bfloat16Kernels(request.param)


VARIANTS = {
    "gpt2": {},
    "modern": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False},
}


def model_of(kernels, variant):
    config = ModelConfig(vocab_size=37, seq_len=24, n_layer=2, n_head=2, n_embd=32, **VARIANTS[variant])
    model = Model(config, kernels)
    model.train()
    model.initialise(3)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recompute", ["mlp", "none", "block"])
def test_gradients_of_a_whole_model_are_those_of_float64(variant, recompute):
    """Per tensor, relative to its norm: rounding to 8 bits leaves 3e-2."""
    tokens = np.random.default_rng(0).integers(0, 37, (2, 6 * 24)).astype(np.int32)
    found = []
    for kernels in (ReferenceKernels("float64"), Bfloat16Kernels(2)):
        model = model_of(kernels, variant)
        work = Pass(model, 6, 24, training=True, recompute=recompute)
        inputs, targets = (kernels.integers(row) for row in tokens)
        for accumulate in (False, True):  # the sum of two equal halves
            work.loss_and_gradients(inputs, targets, 0.5, accumulate)
        found.append(
            ({name: np.array(g, np.float64) for name, g in model.grads.items()}, model.grads.flags[0])
        )
    (exact, loss), (rounded, rounded_loss) = found
    assert abs(rounded_loss - loss) < 3e-3 * loss
    for name, gradient in exact.items():
        distance = np.linalg.norm(rounded[name] - gradient) / np.linalg.norm(gradient)
        assert distance < 3e-2, (name, distance)


def test_a_step_of_the_optimizer_changes_what_the_next_pass_reads():
    """Weights are packed in an order of their own, and again after every step."""
    kernels = Bfloat16Kernels(2)
    model = model_of(kernels, "gpt2")
    tokens = kernels.integers(np.arange(48) % 37)
    work, losses = Pass(model, 2, 24, training=True), []
    optimizer = AdamW(model, TrainConfig(lr=1e-2, warmup=0, steps=100))
    for step in range(8):
        work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
        losses.append(float(model.grads.flags[0]))
        optimizer.step(step, 1.0)
    assert losses[-1] < 0.9 * losses[0]
    fresh = model_of(Bfloat16Kernels(1), "gpt2")
    fresh.kernels.put(fresh.weights.flat, model.weights.flat)
    fresh.refresh()
    total, again = (np.zeros(1, np.float32) for _ in range(2))
    Pass(model, 2, 24, training=False).loss(total, tokens, tokens)
    Pass(fresh, 2, 24, training=False).loss(again, tokens, tokens)
    assert total[0] == again[0]

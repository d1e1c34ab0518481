"""Fused CPU kernels against the reference in float32 and bfloat16; test_model.py covers float64."""

import inspect
from dataclasses import replace
from functools import partial

import numpy as np
import operations
import pytest
from distgpt.core.config import MLPS
from distgpt.core.cpu.fused import activations as loops
from distgpt.core.cpu.fused import muon
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.matmul.blas import rows_round_alike
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.activations import ACTIVATIONS
from distgpt.core.ops.api import IGNORE_INDEX, Affine, Head
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.kernels import CudaKernels
from operations import *  # noqa: F403

from models import VARIANTS, batch


def public(cls):
    return {n: f for n, f in inspect.getmembers(cls, inspect.isfunction) if not n.startswith("_")}


ALLOCATE = {"zeros", "accum_zeros", "scalars"}
HOST = {"integers", "to_host", "to_host_async", "put", "cast_down", "free_memory", "between", "agree"}
PLAIN = {"sort_tokens", "subtract", "move_cached", "topk_logits", "drawn", "add_up"}
INHERITED = {CpuKernels: ALLOCATE | HOST | PLAIN, CudaKernels: ALLOCATE | {"each", "run_together"}}


@pytest.mark.parametrize("backend", INHERITED)
def test_backends_override_all_but_listed_methods(backend):
    wanted, found = public(Kernels), public(backend)
    assert {name for name in wanted if found[name] is wanted[name]} == INHERITED[backend]
    assert wanted.keys() == found.keys()
    for name in wanted:
        mine, theirs = (inspect.signature(each[name]).parameters.values() for each in (wanted, found))
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs], name


@pytest.mark.peer
def test_masked_loss_matches_pytorch():
    torch = pytest.importorskip("torch")
    random, k = np.random.default_rng(0), CpuKernels("float32", 2)
    x, w = (random.standard_normal((rows, 24)).astype("float32") for rows in (70, 131))
    targets = np.where(random.random(70) < 0.6, IGNORE_INDEX, random.integers(0, 131, 70)).astype(np.int32)
    losses, dx, dw, learned = k.zeros(70), k.zeros(70, 24), k.zeros(131, 24), (targets != IGNORE_INDEX).sum()
    k.linear_cross_entropy(losses, dx, dw, x, Head(w, k.zeros(32, 131), 131), targets, 1 / learned, False)
    inputs = [torch.tensor(each, requires_grad=True) for each in (x, w)]
    wanted = torch.from_numpy(np.where(targets == IGNORE_INDEX, -100, targets).astype(np.int64))
    loss = torch.nn.functional.cross_entropy(inputs[0] @ inputs[1].T, wanted, ignore_index=-100)
    loss.backward()
    np.testing.assert_allclose(losses.sum() / learned, loss.item(), rtol=1e-6)
    for own, peers in zip((dx, dw), inputs, strict=True):
        np.testing.assert_allclose(own, peers.grad.numpy(), rtol=0, atol=1e-6)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.ci), 3], ids=["1 thread", "3 threads"])
def threads(request):
    return request.param


@pytest.fixture(params=[partial(CpuKernels, "float32"), Bfloat16Kernels], ids=["float32", "bfloat16"])
def both(request, threads):
    return Kernels("float64"), request.param(threads)


def test_memory_to_orthogonalise_is_exact(both):
    k, kept = both[1], []
    loop, scratch = k.polar

    def noted(*sizes):
        made = scratch(*sizes)
        kept.append(muon.bytes_of(made))
        return made

    k.polar = loop, noted
    operations.check_memory_to_orthogonalise(k, lambda: kept)
    assert CpuKernels().orthogonalise_bytes([(16, 33)]) == 4 * (2 * 16 * 33 + 2 * 16 * 16) + 8 * 33


@pytest.mark.parametrize("smallest", [0.1, 1e-5])
@pytest.mark.parametrize("shape", [(128, 256), (384, 150), (160, 416)])
def test_squares_orthogonalise_long_matrices(both, smallest, shape, monkeypatch):
    """Rounding must not make small singular values grow without limit."""
    monkeypatch.setattr(muon, "USES_AMX", False)
    assert muon.by_squares(*sorted(shape))
    assert muon.by_squares(*sorted(shape), is_bfloat16=True) == (shape == (160, 416) and rows_round_alike())
    left, _, right = np.linalg.svd(operations.Case(both).random(*shape), full_matrices=False)
    matrix = left * np.geomspace(1, smallest, min(shape)) @ right
    found = operations.check_orthogonalised(both, matrix, times=3 if smallest == 0.1 else np.inf)
    assert np.linalg.norm(found, 2) < 1.4  # exactly 1.14


@pytest.mark.parametrize("variant, recompute", [
    ("gpt2", "mlp"), ("gpt2", "none"), ("modern", "block"), ("scaled queries", "mlp"),
])  # fmt: skip
def test_bfloat16_gradients_match_float64(variant, recompute):
    config = replace(VARIANTS[variant], vocab_size=37, seq_len=24, n_head=2, n_kv_head=1, n_embd=32, init_std=0.02)
    tokens, found = batch(config, 6, 24), []
    for kernels in (Kernels("float64"), Bfloat16Kernels(2)):
        model = Model(Architecture(config), kernels)
        model.allocate_master_weights()
        model.initialise(3)
        work = Pass(model, 6, 24, training=True, recompute=recompute)
        for accumulate in (False, True):  # the sum of two equal halves
            work.loss_and_gradients(*tokens, 0.5, accumulate)
        found.append((model.grads, model.grads.flags[0]))
    (exact, loss), (rounded, rounded_loss) = found
    assert abs(rounded_loss - loss) < 3e-3 * loss
    for name, gradient in exact.items():
        distance = np.linalg.norm(rounded[name] - gradient) / np.linalg.norm(gradient)
        assert distance < 3e-2, (name, distance)


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

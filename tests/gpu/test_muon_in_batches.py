"""Muon on a GPU works on all matrices of a shape at once: what it starts, and what comes out."""

from dataclasses import replace

import numpy as np
import pytest
from devices import ON_GPU, cuda_kernels, needs_the_processor  # noqa: F401
from distgpt.core.config import TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import Muon
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import MuonMatrix
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import muon
from hostgpu import BACKWARDS, FORWARDS, host_kernels
from operations import Scalars, tolerance

from models import batch

# Odd, of several tiles and pieces, equal sides both lying and standing, one alone.
SHAPES = [(70, 40), (40, 70), (24, 24), (50, 33), (40, 70), (24, 24), (70, 130), (24, 24), (70, 40)]


def launches(layers, **how):
    """What is started for Muon's part of a step of gpt2-fast, which does not depend on its width."""
    config = replace(preset("gpt2-fast").model, n_layer=layers, n_embd=24, n_head=3, vocab_size=13, seq_len=8, **how)
    k = host_kernels("bfloat16", graphs=False)
    model = Model(Architecture(config), k)
    model.allocate_master_weights()
    model.initialise(1)
    optimizer = Muon(model, TrainConfig(optimizer="muon", lr=0.02))
    tokens, targets = map(k.integers, batch(config, 2, 8))
    Pass(model, 2, 8, training=True).loss_and_gradients(tokens, targets, 1.0, accumulate=False)
    optimizer.compute_norm()
    k.device.synchronize()
    lt = k.matmuls.lt.library
    k.device.xp.launches.clear()
    before = lt.started
    optimizer.prepare(0, 0.02, 1.0, 1.0)
    optimizer.apply()
    k.device.synchronize()
    own = [each for each in k.device.xp.launches if each.source != "optimizer"]  # AdamW's
    return len(own) + lt.started - before


@pytest.mark.ci
@needs_the_processor
@pytest.mark.parametrize("how", [{}, {"norm_gain": True}], ids=["gpt2-fast", "gains between the matrices"])
def test_launches_are_few_and_do_not_grow_with_the_layers(how):
    assert launches(5, **how) == launches(3, **how) <= 63


def test_what_has_no_room_is_done_in_further_batches_of_which_more_never_need_less(monkeypatch, cuda_kernels):
    k = cuda_kernels("float32")
    shapes = [(24, 40)] * 7
    whole = k.orthogonalise_bytes(shapes)
    monkeypatch.setattr(muon, "MOST_BYTES", whole // 2)
    rooms = [k.orthogonalise_bytes(shapes[:n]) for n in range(1, 8)]
    assert rooms == sorted(rooms) and rooms[-1] == rooms[2] <= whole // 2
    monkeypatch.setattr(muon, "MOST_BYTES", 1)
    assert k.orthogonalise_bytes(shapes) == rooms[0]


def updates_of(k):
    rng, made = np.random.default_rng(0), [k.wide_zeros(*shape) for shape in SHAPES]
    for u in made:
        k.put(u, rng.standard_normal(u.shape))
    return made


def on_host(k, arrays):
    return [np.array(k.to_host(x), np.float64) for x in arrays]


@pytest.mark.parametrize("most", [muon.MOST_BYTES, 40_000])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_many_matrices_at_once_are_those_of_the_reference_and_each_alone(dtype, most, monkeypatch, cuda_kernels):
    monkeypatch.setattr(muon, "MOST_BYTES", most)
    k, plain = cuda_kernels(dtype), Kernels("float64")
    together, alone, expected = updates_of(k), updates_of(k), updates_of(plain)
    plain.orthogonalise(expected)
    k.orthogonalise(together)
    for u in alone:
        k.orthogonalise([u])
    for some, one, right in zip(on_host(k, together), on_host(k, alone), expected, strict=True):
        assert np.linalg.norm(some - right) < 3 * tolerance(k) * np.linalg.norm(right), right.shape
        if not ON_GPU:  # where the library may take another algorithm for another batch
            np.testing.assert_array_equal(some, one)


def stepped(k, low):
    """p, its copy and v after a step along many updates, which lie in one buffer but v."""
    rng, matrices = np.random.default_rng(0), []
    for shape in SHAPES:
        p, u, v = k.wide_zeros(*shape), k.wide_zeros(*shape), k.wide_zeros(max(shape))
        for array in (p, u):
            k.put(array, rng.standard_normal(shape))
        k.put(v, rng.standard_normal(max(shape)) ** 2)
        matrices.append(MuonMatrix(p, k.zeros(*shape) if low else None, v, u))
    norm, scalars = k.scalars(1), k.scalars(5)
    k.put(norm, np.array([3.0]).view(Scalars))
    k.put(scalars, np.array([0.5, 0.7, 0.9, 1e-2, 0.3]).view(Scalars))
    k.muon(matrices, norm, scalars, 0.95)
    return on_host(k, [x for each in matrices for x in (each.p, each.v, each.low) if x is not None])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_step_of_many_matrices_is_that_of_the_reference(dtype, cuda_kernels):
    k, low = cuda_kernels(dtype), dtype == "bfloat16"
    for found, right in zip(stepped(k, low), stepped(Kernels("float64"), low), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance(k) * np.abs(right).max())


@needs_the_processor
def test_no_order_of_blocks_and_warps_changes_a_bit():
    found = []
    for order in (FORWARDS, BACKWARDS, 2):
        k = host_kernels("float32", order=order)
        updates = updates_of(k)
        k.orthogonalise(updates)
        found.append([*on_host(k, updates), *stepped(k, False)])
    for other in found[1:]:
        for some, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(some, first)

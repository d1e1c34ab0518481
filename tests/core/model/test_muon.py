"""Muon: its updates on any number of ranks, and in resumed runs."""

from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.memory import ALIGNED, MATRIX
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import Muon, borders, muon_scalars
from distgpt.core.model.optim import learning_rate, step_scalars
from distgpt.core.ops.kernels import Kernels
from steps import build_step, state_for
from threadranks import on_all_ranks

from conftest import SMALL, in_one_job, losses, slow_ranks, train

MODEL = ModelConfig(64, seq_len=8, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, value_embeddings=True)
MODEL = replace(MODEL, mlp="swiglu", tied=False)
CONFIG = TrainConfig(batch_size=24, seed=3, recompute="mlp", matmul="own", clip=0.5)
CONFIG = replace(CONFIG, optimizer="muon", lr=0.02, embedding_lr=0.1)


def trained(comm, kernels=None, **how):
    config = replace(CONFIG, **how)
    model = Model(Architecture(MODEL), kernels or CpuKernels("float32"))
    model.allocate_master_weights(comm.size)
    model.initialise(1)
    tokens = ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % MODEL.vocab_size)
    batches = Batches(tokens, MODEL.seq_len, config.batch_size, config.seed)
    state = state_for(model, config, comm)
    work, optimizer = build_step(state, comm, config), state.optimizer
    read = [work.launch(step, batches).wait()[:2] for step in range(5)]
    return model.weights, optimizer, np.array(read)


def test_muon_updates_only_matrices_of_layers():
    _, optimizer, _ = trained(SerialComm(), Kernels())
    for spec in optimizer.model.layout.specs:
        is_muons = spec.name.startswith("blocks.") and spec.name.endswith((".qkv.w", ".proj.w", ".fc.w"))
        assert (spec.group == MATRIX) is is_muons, spec.name
        second = (sum(max(shape) for shape in parts_of(spec)),) if is_muons else spec.shape
        assert (optimizer.m[spec.name].shape, optimizer.v[spec.name].shape) == (spec.shape, second), spec.name


def parts_of(spec):
    """Return the shapes of the matrices; q, k and v are separate, and swiglu's two."""
    rows, columns = spec.shape
    heights = {"qkv": (32, 16, 16), "fc": (rows // 2, rows // 2)}.get(spec.name.split(".")[-2], (rows,))
    return [(height, columns) for height in heights]


@pytest.fixture
def updated():
    def moved(config, change=lambda gradients: None):
        model = Model(Architecture(config), Kernels())
        model.allocate_master_weights()
        model.initialise(1)
        optimizer = Muon(model, replace(CONFIG, weight_decay=0.0, warmup=0, clip=0.0))
        model.grads.flat[:] = np.random.default_rng(0).standard_normal(model.layout.size)
        change(model.grads)
        before = {name: array.copy() for name, array in model.weights.items()}
        optimizer.step(0, 1.0)
        return {spec: (before[spec.name] - model.weights[spec.name]) / CONFIG.lr for spec in model.layout.specs}

    return moved


def test_heads_are_orthogonalized_separately(updated):
    """Heads with equal gradients still move at full length."""

    def repeat(gradients):
        for first in (0, 32, 64):  # q, k and v, of four heads of 8 rows
            of = gradients["blocks.0.attn.qkv.w"]
            of[first + 8 : first + 16] = of[first : first + 8]

    found = updated(replace(MODEL, n_kv_head=4), repeat)
    (moved,) = (values for spec, values in found.items() if spec.name == "blocks.0.attn.qkv.w")
    np.testing.assert_allclose([np.linalg.norm(part) for part in np.split(moved, 3)], np.sqrt(32), rtol=0.1)


def test_update_moves_equally_in_every_direction(updated):
    for spec, moved in updated(MODEL).items():
        if spec.group != MATRIX:
            assert 0 < abs(moved).max() < 0.11 / CONFIG.lr, spec.name
            continue
        for rows, columns in parts_of(spec):
            part, moved = moved[:rows], moved[rows:]
            length = np.linalg.norm(part) / max(1, rows / columns) ** 0.5 / min(rows, columns) ** 0.5
            assert 0.85 < length < 1.15, spec.name


def test_muon_decay_falls_with_the_rate():
    config = replace(CONFIG, steps=100, warmup=10, schedule="wsd", decay_fraction=0.5, weight_decay=0.2)
    early, late = (muon_scalars(config, step, learning_rate(config, step), 1.0, 1.0) for step in (20, 99))
    assert early.weight_decay == 0.2 and late.weight_decay == pytest.approx(0.2 * 0.02)
    assert 0.85 < early.momentum < late.momentum < config.momentum


def test_groups_have_separate_learning_rates():
    config = replace(CONFIG, embedding_lr=0.3, head_lr=0.0, vector_lr=0.01, warmup=0, schedule="constant")
    scale, clip, _, *groups = step_scalars(config, 0, config.lr, 0.5, 0.25)
    assert (scale, clip) == (0.5, 2 * config.clip)
    rates = np.reshape(groups, (-1, 2))[:, 0] * (1 - config.beta1)
    assert rates == pytest.approx([0.02, 0.3, 0.3, 0.02, 0.01])  # value_lr is embedding_lr
    own = step_scalars(replace(config, value_lr=0.1), 0, config.lr, 0.5, 0.25)
    assert own[7] == pytest.approx(0.1 / (1 - config.beta1))
    plain = step_scalars(replace(config, optimizer="adamw"), 0, config.lr, 0.5, 0.25)
    assert plain[4::2] == pytest.approx([1 - rate * config.weight_decay for rate in rates[:4]] + [1.0])


def test_borders_cut_no_matrix():
    layout = Architecture(MODEL).layout
    specs = [spec for spec in layout.specs if spec.group == MATRIX]
    matrices = [(start := layout.offsets[spec.name], start + spec.size) for spec in specs]
    for parts in range(1, 40):
        bounds = borders(layout, parts, lambda spec: spec.size)
        assert len(bounds) == parts + 1 and bounds == sorted(bounds)
        assert bounds[0] == 0 and bounds[-1] == layout.size
        for bound in bounds:
            assert bound % ALIGNED == 0 and not any(start < bound < stop for start, stop in matrices)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_muon_updates(ranks):
    weights, optimizer, read = trained(SerialComm())
    for how in ({}, {"grad_sync": "sharded"}, {"grad_sync": "overlapped"}):
        found = on_all_ranks(ranks, lambda comm, how=how: trained(comm, **how))
        for others, part, numbers in found:
            np.testing.assert_allclose(others.flat, weights.flat, atol=2e-5, err_msg=str(how))
            np.testing.assert_allclose(numbers, read, rtol=1e-4)
            np.testing.assert_allclose(part.m.flat, optimizer.m.flat[part.own], atol=2e-6)
            np.testing.assert_allclose(part.v.flat, optimizer.v.flat[part.v_own], atol=2e-6)
        for others, *_ in found[1:]:
            np.testing.assert_array_equal(others.flat, found[0][0].flat)


def test_reproducible_parts_match_on_any_ranks():
    how = {"reproducible_parts": 4}
    weights, *_ = trained(SerialComm(), **how, grad_accum=4)
    for ranks in (2, 4):
        found = on_all_ranks(ranks, lambda comm, ranks=ranks: trained(comm, **how, grad_accum=4 // ranks))
        assert all(np.array_equal(others.flat, weights.flat) for others, *_ in found)


RECIPE = ["--optimizer", "muon", "--lr", "0.02", "--set", "embedding_lr=0.1", "--schedule", "constant"]
RECIPE += ["--save-every", "5", "--n-head", "4", "--n-kv-head", "2", "--positions", "rope"]


@slow_ranks
def test_muon_runs_resume_and_move_between_ranks(tmp_path):
    whole = train(tmp_path / "whole", "--steps", "10", *RECIPE)
    begin = ["train", *SMALL, *RECIPE, "--stage", "mpi", "--out"]
    resume = ["train", "--stage", "mpi", "--threads", "1", "--steps", "10", "--resume", "auto", "--out"]
    ways = {sync: ["--grad-sync", sync] for sync in ("allreduce", "sharded")} | {"local": ["--outer-every", "5"]}
    jobs = [[*begin, tmp_path / "moved", "--steps", "5", "--grad-sync", "sharded"]]
    for name, how in ways.items():
        jobs += [[*begin, tmp_path / name, "--steps", "5", *how], [*resume, tmp_path / name]]
        jobs.append([*begin, tmp_path / f"{name}-whole", "--steps", "10", *how])
    assert all(ended == ("", {0}) for ended in in_one_job(jobs, ranks=2))
    for name in ways:
        assert losses(tmp_path / name) == losses(tmp_path / f"{name}-whole"), name
    train(tmp_path / "moved", "--steps", "10", "--resume", "auto", *RECIPE)
    for name in ("allreduce", "sharded", "moved"):
        np.testing.assert_allclose(losses(tmp_path / name), losses(whole), rtol=1e-5)

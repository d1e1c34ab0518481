"""One rank's gradients, computed again by another: a silent error is noticed, and whose it may be."""

import os
import platform
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import SMALL, inside, losses, refused
from steps import build_step
from threadranks import on_all_ranks

from distgpt.core.base.errors import DistgptError
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.guards import recheck
from distgpt.guards.recheck import Recheck

CONFIG = TrainConfig(batch_size=12, grad_accum=2, recheck_every=2, seed=3, recompute="mlp", matmul="own")
STEPS = 8


def steps(comm, config=CONFIG, faulty=None, at=None):
    """Some steps; on rank `faulty` one bit flips in the gradients of its first micro-batch of step `at`."""
    model = Model(
        Architecture(ModelConfig(vocab_size=16, seq_len=8, n_layer=1, n_head=1, n_embd=16)),
        CpuKernels("float32"),
    )
    model.train(comm.size)
    model.initialise(1)
    batches = Batches(ArrayTokens(np.arange(500, dtype=np.uint16) % 16), 8, config.batch_size, config.seed)
    inspector = Recheck(comm, model, config) if config.recheck_every else None
    work = build_step(AdamW(model, config), comm, config, inspector=inspector)
    compute = work._compute

    def computed(step, batches, micro_batch, rank, sends=False):
        compute(step, batches, micro_batch, rank, sends)
        if comm.rank == rank == faulty and step == at and not micro_batch:
            model.grads.flat[100:101].view(np.uint32)[0] ^= 1  # the last bit

    work._compute = computed
    for step in range(STEPS):
        work.launch(step, batches)
    return model.weights.flat.copy()


def pairs(size, config=CONFIG):
    comm = type("Sized", (), {"size": size})
    return [Recheck(comm, None, config).pair(step) for step in range(200)]


def test_whose_gradients_are_computed_again_by_whom():
    found = pairs(3)
    assert {pair for pair in found if pair} == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    assert [step for step, pair in enumerate(found) if pair] == list(range(1, 200, 2))
    assert set(pairs(1)) == {None, (0, 0)} and set(pairs(2)) == {None, (0, 1), (1, 0)}
    assert pairs(3, replace(CONFIG, seed=4)) != found and not any(pairs(3, replace(CONFIG, recheck_every=0)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_replay_changes_nothing(size):
    plain = on_all_ranks(size, partial(steps, config=replace(CONFIG, recheck_every=0)))
    for found in on_all_ranks(size, steps):
        assert np.array_equal(found, plain[0])


@pytest.mark.parametrize("size", [1, 3])
def test_a_flipped_bit_is_noticed_and_both_hosts_are_named(size):
    at, (rank, other) = next((step, pair) for step, pair in enumerate(pairs(size)) if pair)
    compute = {1: "asked twice", 3: f"and rank {other} on {platform.node()}"}[size]
    if size == 1:
        flips = iter([False, True])
        digest = Recheck.digest
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recheck, "digest", lambda self: _flipped(digest(self), next(flips, False)))
            errors = on_all_ranks(size, steps)
    else:
        errors = on_all_ranks(size, partial(steps, faulty=rank, at=at))
    for error in errors:
        assert isinstance(error, DistgptError) and error.exit_code == 71 and error.shared
        assert f"rank {rank} on {platform.node()}" in str(error) and compute in str(error)
        assert f"at step {at + 1}" in str(error)


def _flipped(digest, flip):
    return replace(digest, bits=digest.bits ^ flip)


def test_where_bits_may_differ_sizes_are_compared(monkeypatch):
    """As on GPUs, and on unlike processors."""
    monkeypatch.setattr(Recheck, "_bits_depend_on", lambda self: "")
    at, (rank, _) = next((step, pair) for step, pair in enumerate(pairs(2)) if pair)
    small = on_all_ranks(2, partial(steps, faulty=rank, at=at))
    assert all(isinstance(found, np.ndarray) for found in small)
    monkeypatch.setattr(Recheck, "_bits_depend_on", lambda self: "the same")
    assert all(
        isinstance(found, DistgptError) for found in on_all_ranks(2, partial(steps, faulty=rank, at=at))
    )
    digest = recheck.Digest(1, 2.0, 3.0)
    compared = Recheck(None, None, CONFIG)._are_same
    assert compared(digest, replace(digest, bits=2, norm=3.001), to_the_bit=False)
    assert not compared(digest, replace(digest, norm=3.1), to_the_bit=False)
    assert not compared(digest, replace(digest, loss=2.1), to_the_bit=False)
    assert not compared(digest, replace(digest, loss=float("nan")), to_the_bit=False)


def test_a_run_that_replays_is_the_same_run_and_one_with_an_error_ends(tmp_path, monkeypatch):
    words = ["train", *SMALL, "--steps", "6"]
    for name, more in (("plain", []), ("checked", ["--recheck-every", "2"])):
        assert inside(*words, *more, "--out", tmp_path / name).returncode == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "checked")
    digest, number = Recheck.digest, iter(range(9))
    monkeypatch.setattr(Recheck, "digest", lambda self: replace(digest(self), bits=next(number)))
    ended = inside(*words, "--recheck-every", "2", "--out", tmp_path / "run")
    refused(ended, 71, "asked twice, found different gradients", "at step 2", os.uname().nodename, late=True)

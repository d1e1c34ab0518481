"""--reproducible-parts and --deterministic: identical results for any ranks and threads."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.memory import FlatBuffer, Layout, Spec
from distgpt.core.train.memory import fitting
from distgpt.parallel import reductions as ways
from distgpt.parallel.choose import Chosen
from distgpt.parallel.loops import sums
from distgpt.parallel.reductions import tree_sum
from distgpt.parallel.reproducible import Tree, usual_parts
from distgpt.parallel.sharded import shards
from steps import CONFIG, MODEL, trained
from test_gradsync import by_twos
from threadranks import on_all_ranks

from conftest import SMALL, inside, succeeded

PARTS = replace(CONFIG, batch_size=16, reproducible_parts=8, grad_accum=0, matmul="auto")


def units_of(count, size):
    scales = np.float32(10.0) ** np.random.default_rng(1).integers(-4, 4, (count, 1))
    return (np.random.default_rng(2).standard_normal((count, size)) * scales).astype(np.float32)


@pytest.mark.parametrize("count, threads", [(1, 1), (2, 1), (4, 2), (8, 1), (16, 2)])
def test_tree_of_units_on_one_rank(count, threads):
    layout = Layout([Spec("a", (9001,))])
    units, kernels = units_of(count, layout.size + 1), CpuKernels(threads=threads)
    grads = FlatBuffer(layout, kernels.accum_zeros, flags=3)
    tree = Tree(grads, kernels, count)
    for _ in range(2):  # its memory is used again
        grads.flags[1:] = 7
        for number, unit in enumerate(units):
            grads.with_flags[: layout.size + 1] = unit
            tree.add(number)
        assert (grads.with_flags[: layout.size + 1] == by_twos(units)).all() and (grads.flags[1:] == 7).all()
    assert count <= 2 or (by_twos(units) != units.sum(0)).any()  # another order gives other bits


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_tree_over_ranks(count):
    parts = units_of(count, 10007)
    total, taken = np.full(10007, np.nan, np.float32), parts.copy()
    sums.add_tree(0, 5000, total, taken)
    sums.add_tree(5000, 10007, total, taken)
    assert (total == by_twos(parts)).all()

    def summed(comm):
        value = parts[comm.rank, :1].copy()
        tree_sum(comm, value)
        return value[0]

    assert on_all_ranks(count, summed) == [by_twos(parts[:, :1])[0]] * count


def bits(ranks, threads=1, **how):
    config = replace(PARTS, **how)
    config = replace(config, grad_accum=config.reproducible_parts // ranks or 1)

    def act(comm):
        work, _, read = trained(comm, config, steps=4, threads=threads)
        model = work.model
        if work.optimizer.is_part:  # weights in full precision stay with their owner
            comm.all_gather(model.weights.flat, shards(config, model.layout, comm.size))
        return read, model.weights.flat.tobytes()

    return on_all_ranks(ranks, act)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_identical_for_any_ranks_and_threads(dtype, monkeypatch):
    monkeypatch.setattr(ways, "PIECE", 3000)
    (wanted,) = bits(1, dtype=dtype)
    for (ranks, threads), sync in product(((1, 2), (2, 1), (2, 2), (4, 1), (8, 1)), ("allreduce", "sharded")):
        assert bits(ranks, threads, dtype=dtype, grad_sync=sync) == [wanted] * ranks, (ranks, threads, sync)
    large = {"dtype": dtype, "batch_size": 128}  # enough sequences of a unit for all lanes of a vector
    (alone,) = bits(1, **large)
    assert bits(1, 2, **large) == [alone] and bits(2, 1, **large) == [alone] * 2
    (usual,) = bits(1, dtype=dtype, reproducible_parts=0)
    assert usual[1] != wanted[1] and np.allclose(usual[0], wanted[0], rtol=1e-5 if dtype == "float32" else 2e-2)


def test_units_decide_micro_batches_and_matmul():
    assert TrainConfig(reproducible_parts=4).matmul_backend == "own" and TrainConfig().matmul_backend == "auto"
    assert TrainConfig(reproducible_parts=4, matmul="blas").matmul_backend == "blas"
    assert [usual_parts(batch) for batch in (1, 6, 12, 16, 24)] == [1, 2, 4, 8, 8]
    run = RunConfig(model=MODEL, train=replace(PARTS, grad_accum=2))
    for ranks in (1, 2, 8):
        assert fitting(run, CpuKernels(), Chosen(run.train, ranks), 1 << 40, "here")[0].grad_accum == 8 // ranks


def test_deterministic_flag_becomes_a_setting(tmp_path):
    succeeded("train", *SMALL, "--steps", "3", "--deterministic", "--out", tmp_path / "run")
    saved = (tmp_path / "run" / "config.toml").read_text()
    assert "reproducible_parts = 8" in saved and 'matmul = "auto"' in saved
    (tmp_path / "my.toml").write_text("reproducible_parts = 2")
    words = [*SMALL, "--steps", "3", "--config", tmp_path / "my.toml", "--grad-accum", "4"]
    result = inside("train", *words, "--deterministic", "--out", tmp_path / "two")
    assert "--grad-accum 4" in result.stdout and result.returncode == 0  # has no effect
    assert "reproducible_parts = 2" in (tmp_path / "two" / "config.toml").read_text()
    again = [*SMALL, "--out", tmp_path / "two", "--resume", "auto", "--steps", "5", "--grad-accum", "0"]
    result = inside("train", *again, "--reproducible-parts", "0")
    assert result.returncode == 0 and "micro-batches" not in result.stdout
    result = inside("train", *SMALL, "--reproducible-parts", "3", "--out", tmp_path / "other")
    assert result.returncode == 2 and "--reproducible-parts" in result.stderr and not (tmp_path / "other").exists()

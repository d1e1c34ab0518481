"""--reproducible-parts and --deterministic: the same bits on any number of ranks and threads."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.memory import FlatBuffer, Layout, Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.tensors import DATA_SUM, read_header
from distgpt.core.train.memory import fitting
from distgpt.core.train.plan import refuse_unsuited
from distgpt.parallel import reductions as ways
from distgpt.parallel.choose import Chosen
from distgpt.parallel.loops import sums
from distgpt.parallel.reductions import tree_sum
from distgpt.parallel.reproducible import Tree, usual_parts
from distgpt.parallel.sharded import shards
from steps import build_step, state_for
from threadranks import on_all_ranks

from conftest import SMALL, inside, losses, needs_mpi, train

MODEL = ModelConfig(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32)
CONFIG = TrainConfig(batch_size=16, reproducible_parts=8, seed=3, recompute="mlp", clip=0.5)


def by_twos(numbers):
    """The definition."""
    numbers = list(numbers)
    while len(numbers) > 1:
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


def units_of(count, size):
    scales = np.float32(10.0) ** np.random.default_rng(1).integers(-4, 4, (count, 1))
    return (np.random.default_rng(2).standard_normal((count, size)) * scales).astype(np.float32)


@pytest.mark.parametrize("count, threads", [(1, 1), (2, 1), (4, 2), (8, 1), (16, 2)])
def test_a_tree_of_units_on_one_rank(count, threads):
    layout = Layout([Spec("a", (9001,))])
    units = units_of(count, layout.size + 1)
    kernels = CpuKernels(threads=threads)
    grads = FlatBuffer(layout, kernels.wide_zeros, flags=3)
    tree = Tree(grads, kernels, count)
    for _ in range(2):  # its memory is used again
        grads.flags[1:] = 7
        for number, unit in enumerate(units):
            grads.with_flags[: layout.size + 1] = unit
            tree.add(number)
        assert (grads.with_flags[: layout.size + 1] == by_twos(units)).all() and (grads.flags[1:] == 7).all()
    assert count <= 2 or (by_twos(units) != units.sum(0)).any()  # another order gives other bits


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_tree_over_ranks(count):
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


def trained(comm, dtype, threads, config):
    kernels = Bfloat16Kernels(threads) if dtype == "bfloat16" else CpuKernels(dtype, threads, config.matmul_backend)
    run = replace(config, dtype=dtype)
    run = replace(run, grad_accum=config.reproducible_parts // comm.size or 1)
    model = Model(Architecture(MODEL), kernels)
    model.allocate_master_weights(comm.size)
    model.initialise(1)
    batches = Batches(ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % 64), 8, run.batch_size, run.seed)
    state = state_for(model, run, comm)
    work, optimizer = build_step(state, comm, run), state.optimizer
    read = [work.launch(step, batches).wait()[:2] for step in range(6)]
    if optimizer.is_part:  # weights in full precision stay with their owner
        comm.all_gather(model.weights.flat, shards(run, model.layout, comm.size))
    return read, model.weights.flat.tobytes()


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_threads_and_sharding_change_no_bit(dtype, monkeypatch):
    monkeypatch.setattr(ways, "PIECE", 3000)
    wanted = on_all_ranks(1, lambda comm: trained(comm, dtype, 1, CONFIG))[0]
    for ranks, threads, sync in product((1, 2, 4, 8), (1, 2), ("allreduce", "sharded")):
        if threads == 2 and ranks > 2:
            continue
        config = replace(CONFIG, grad_sync=sync)
        found = on_all_ranks(ranks, lambda comm, c=config, t=threads: trained(comm, dtype, t, c))
        assert found == [wanted] * ranks, (ranks, threads, sync)
    large = replace(CONFIG, batch_size=128)  # enough sequences of a unit for all lanes of a vector
    found = [on_all_ranks(n, lambda comm, t=t: trained(comm, dtype, t, large)) for n, t in ((1, 1), (1, 2), (2, 1))]
    assert found == [found[0], found[0], found[0] * 2]
    usual = on_all_ranks(1, lambda comm: trained(comm, dtype, 1, replace(CONFIG, reproducible_parts=0)))[0]
    assert usual[1] != wanted[1]
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert np.allclose(usual[0], wanted[0], rtol=tolerance)


def test_units_decide_the_micro_batches_and_matmul():
    assert TrainConfig(reproducible_parts=4).matmul_backend == "own" and TrainConfig().matmul_backend == "auto"
    assert TrainConfig(reproducible_parts=4, matmul="blas").matmul_backend == "blas"
    assert [usual_parts(batch) for batch in (1, 6, 12, 16, 24)] == [1, 2, 4, 8, 8]
    run = RunConfig(model=MODEL, train=replace(CONFIG, grad_accum=2))
    for ranks in (1, 2, 8):
        assert fitting(run, CpuKernels(), Chosen(run.train, ranks), 1 << 40, "here")[0].grad_accum == 8 // ranks


@pytest.mark.parametrize(
    "ranks, on_gpu, words, how",
    [
        (1, True, "CPU stages", {}),
        (1, False, "power of two", {"reproducible_parts": 6, "batch_size": 12}),
        (1, False, "does not divide --batch-size 12", {"batch_size": 12}),
        (3, False, "cannot be given to 3 ranks", {}),
        (16, False, "cannot be given to 16 ranks", {}),
        (2, False, "allreduce or sharded", {"grad_sync": "overlapped"}),
        (2, False, "float32", {"gradient_dtype": "bfloat16"}),
        (1, False, "float32 or bfloat16", {"dtype": "float64"}),
        (1, False, "matmul of our own", {"matmul": "blas"}),
    ],
)
def test_what_could_not_keep_the_promise_is_refused(ranks, on_gpu, words, how):
    with pytest.raises(UsageError, match=words):
        refuse_unsuited(replace(CONFIG, **how), ranks, on_gpu)
    refuse_unsuited(CONFIG, 2, on_gpu=False)


def test_the_flag_of_a_cpu_stage_is_a_setting_of_the_run(tmp_path):
    result = inside("train", *SMALL, "--steps", "3", "--deterministic", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    said = (tmp_path / "run" / "config.toml").read_text()
    assert "reproducible_parts = 8" in said and 'matmul = "auto"' in said
    (tmp_path / "my.toml").write_text("reproducible_parts = 2")
    words = [*SMALL, "--steps", "3", "--config", tmp_path / "my.toml", "--grad-accum", "4"]
    result = inside("train", *words, "--deterministic", "--out", tmp_path / "two")
    assert "--grad-accum 4 has no effect" in result.stdout and result.returncode == 0
    assert "reproducible_parts = 2" in (tmp_path / "two" / "config.toml").read_text()
    again = [*SMALL, "--out", tmp_path / "two", "--resume", "auto", "--steps", "5", "--grad-accum", "0"]
    result = inside("train", *again, "--reproducible-parts", "0")
    assert result.returncode == 0 and "micro-batches" not in result.stdout
    result = inside("train", *SMALL, "--reproducible-parts", "3", "--out", tmp_path / "other")
    assert result.returncode == 2 and "power of two" in result.stderr and not (tmp_path / "other").exists()


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_runs_on_any_number_of_ranks_leave_the_same_files(tmp_path):
    from test_mpi import trained_together

    words = ["--steps", "20", "--reproducible-parts", "4", "--val-fraction", "0.2"]
    for ranks, rounds in ((2, 2), (4, 1)):
        trained_together(ranks, [(tmp_path / str(ranks), [*words, "--grad-accum", str(rounds)])])
    alone = train(tmp_path / "alone", *words, "--threads", "2")
    sums = {read_header(run / "weights.safetensors").metadata[DATA_SUM] for run in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 3 and len(sums) == 1
    assert len({str(losses(run)) for run in tmp_path.iterdir()}) == 1 and len(losses(alone)) == 20


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_stages_are_compared_to_the_bit(tmp_path):
    words = [*SMALL, "--batch-size", "8", "--steps", "6"]
    result = inside("bench", "stages", *words, "--deterministic", "--out", tmp_path / "compare")
    assert result.returncode == 0, result.stderr
    assert "in a single bit" in " ".join(result.stdout.split())

"""Strategies of ranks: choice by settings, and shares by speed."""

import gc
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.components import components
from distgpt.core.config.settings import GRAD_SYNCS, TrainConfig
from distgpt.core.saved.checkpoint import State, load_state
from distgpt.core.saved.tensors import DATA_SUM, read_header
from distgpt.core.train.parallel_strategy import MicroBatches, Placement, Strategy
from distgpt.core.train.plan import reject_unsuited
from distgpt.parallel import balance
from distgpt.parallel.balance import Balanced, hosts_checksum, measured_shares, shares_by, shares_so_far
from distgpt.parallel.choose import Chosen
from distgpt.parallel.local_steps import LocalPlacement
from distgpt.parallel.node_memory import SharedGradients, shared_rows
from distgpt.parallel.reproducible import ReproducibleParts
from distgpt.parallel.sharded import ShardedPlacement
from hypothesis import given
from hypothesis import strategies as st
from steps import CONFIG, model_of, steps_of, trained
from threadranks import on_all_ranks

from conftest import MPIRUN, SMALL, ci_ranks, distgpt, losses, slow_ranks, summary, train, trained_together, validations

PARTS = {"reproducible_parts": 8, "batch_size": 16, "grad_accum": 0, "matmul": "auto"}
LOCAL = {"outer_every": 4, "grad_accum": 0}
AUTO = {"balance": "auto", "grad_accum": 0}


def test_strategy_parts_are_chosen_separately():
    model = model_of()
    model.make_gradients()
    for sync, outer, parts in product(GRAD_SYNCS, (0, 4), (0, 8)):
        t = replace(CONFIG, batch_size=8, grad_sync=sync, outer_every=outer, reproducible_parts=parts)
        placement = LocalPlacement if outer else ShardedPlacement if sync == "sharded" else Placement
        assert type(Chosen(t, 2).placement) is placement and type(Chosen(t, 1).placement) is Placement
        micro_batches = ReproducibleParts if parts else MicroBatches
        assert type(Chosen(t, 2).micro_batches(t, 0, model)) is micro_batches
    assert type(components().strategy(CONFIG, 1)) is Strategy and type(components().strategy(CONFIG, 2)) is Chosen


@pytest.mark.parametrize("ranks, on_gpu, words, how", [
    (2, False, ["--gradient-dtype bfloat16", "float64"], {"gradient_dtype": "bfloat16", "dtype": "float64"}),
    (1, True, ["--reproducible-parts", "CPU stage"], PARTS),
    (1, False, ["--reproducible-parts (6)"], {**PARTS, "reproducible_parts": 6, "batch_size": 12}),
    (1, False, ["--reproducible-parts (8)", "--batch-size (12)"], {**PARTS, "batch_size": 12}),
    (3, False, ["--reproducible-parts (8)", "ranks (3)"], PARTS),
    (16, False, ["--reproducible-parts (8)", "ranks (16)"], PARTS),
    (2, False, ["--deterministic", "--grad-sync allreduce"], {**PARTS, "grad_sync": "overlapped"}),
    (2, False, ["--deterministic", "--gradient-dtype float32"], {**PARTS, "gradient_dtype": "bfloat16"}),
    (1, False, ["--deterministic", "--dtype float32"], {**PARTS, "dtype": "float64"}),
    (1, False, ["--deterministic", "matmul"], {**PARTS, "matmul": "blas"}),
    (2, False, ["--outer-every 4", "--grad-sync", "sharded"], {**LOCAL, "grad_sync": "sharded"}),
    (2, False, ["--outer-every 4", "--grad-sync", "overlapped"], {**LOCAL, "grad_sync": "overlapped"}),
    (2, False, ["--outer-every 4", "--deterministic"], {**LOCAL, "reproducible_parts": 8}),
    (2, False, ["--balance auto", "--deterministic"], {**AUTO, "reproducible_parts": 8}),
    (2, False, ["--balance auto", "--outer-every"], {**AUTO, "outer_every": 4}),
])  # fmt: skip
def test_unsuited_combinations_are_rejected(ranks, on_gpu, words, how):
    with pytest.raises(UsageError) as refused:
        reject_unsuited(replace(CONFIG, **how), ranks, on_gpu)
    assert all(word in str(refused.value) for word in words)
    if "reproducible_parts" not in how or how.keys() & {"outer_every", "balance"}:  # one rank shares nothing
        reject_unsuited(replace(CONFIG, **how), 1, on_gpu)


def test_suited_combinations_are_accepted():
    for sync, wire in product(GRAD_SYNCS, ("float32", "bfloat16")):
        reject_unsuited(TrainConfig(grad_sync=sync, gradient_dtype=wire), 2, on_gpu=True)
    for ranks, on_gpu, how in ((2, False, PARTS), (2, True, {"outer_every": 4}), (2, False, AUTO)):
        reject_unsuited(replace(CONFIG, **how), ranks, on_gpu)


@pytest.mark.parametrize("able, ranks, mode, refused", [
    ((0,), 2, "overlapped", True),
    ((0, 1), 2, "overlapped", False),
    ((), 2, "allreduce", False),
    ((), 1, "overlapped", False),
])  # fmt: skip
def test_overlapped_requires_mpi_threads_on_all_ranks(able, ranks, mode, refused):
    def act(comm):
        comm.is_threadsafe = comm.rank in able
        Chosen(replace(CONFIG, grad_sync=mode), comm.size).refuse_unable(comm, on_gpu=False)

    assert ["MPI_THREAD_MULTIPLE" in str(found) for found in on_all_ranks(ranks, act)] == [refused] * ranks


@pytest.mark.parametrize("how, ranks, wanted", [
    ({}, 2, []),
    ({"grad_sync": "sharded"}, 2, []),
    ({"outer_every": 2}, 1, []),
    ({"outer_every": 2}, 2, ["nesterov"]),
    (PARTS, 1, ["each"]),
])  # fmt: skip
def test_warmup_compiles_only_chosen_loops(how, ranks, wanted, monkeypatch):
    model, called = model_of(), []
    for name in ("nesterov", "each"):
        plain = getattr(model.kernels, name)
        monkeypatch.setattr(model.kernels, name, lambda *args, n=name, plain=plain: called.append(n) or plain(*args))
    Chosen(replace(CONFIG, **how), ranks).warmup_pass(model)
    assert sorted({*called}) == wanted


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sample_needs_no_new_loops(dtype):
    code = f"""
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.generate.engine import sample
from distgpt.core.components import components
from distgpt.core.train.setup import warmup_pass
from distgpt.core.train.parallel_strategy import Strategy
run = RunConfig(ModelConfig(vocab_size=256, seq_len=8, n_layer=2, n_head=2, n_embd=32), TrainConfig())
kernels = open_stage("serial").kernels("{dtype}")
warmup_pass(kernels, run, Strategy(run.train, 1))
model = components().model(run.train).build(run, kernels)
model.allocate_master_weights()
model.initialise(0)
before = set(disk_cache.used)
sample(model, load_tokenizer("byte"), 0, length=4)
print(len(before) > 20, disk_cache.used - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "True set()", result.stdout


def test_shares_follow_speed():
    assert shares_by([1, 1], 8) == [4, 4] and shares_by([1, 3], 8) == [6, 2]
    assert shares_by([1, 1000], 8) == [7, 1] and shares_by([5, 4, 3], 3) == [1, 1, 1]
    assert shares_by([100, 101], 8) == [4, 4] and shares_by([100, 120], 64) == [35, 29]


@given(seconds=st.tuples(st.integers(1, 99), st.integers(1, 99)), total=st.integers(2, 80))
def test_shares_are_optimal(seconds, total):
    shares = shares_by(seconds, total)
    took = max(a * b for a, b in zip(shares, seconds, strict=True))
    assert sum(shares) == total and min(shares) >= 1
    assert took == min(max(n * seconds[0], (total - n) * seconds[1]) for n in range(1, total))


@pytest.mark.parametrize("shares", [[1, 11], [5, 2, 5]])
@pytest.mark.parametrize("mode", ["allreduce", "sharded", "overlapped"])
def test_uneven_shares_match_even_ones(shares, mode):
    config = replace(CONFIG, grad_sync=mode)

    def uneven(comm):
        micro_batches = Balanced(config, comm.size, comm.rank, shares)
        return trained(comm, config, 4, steps_of(comm, config, micro_batches=micro_batches))

    (_, even, known), *_ = on_all_ranks(len(shares), lambda comm: trained(comm, config, 4))
    found = on_all_ranks(len(shares), uneven)
    for _, seen, read in found:
        assert (seen[-1] == found[0][1][-1]).all() and abs(seen[-1] - even[-1]).max() < 1e-5
        assert np.allclose(read, known, rtol=1e-5)


def test_measured_shares_agree_on_all_ranks(monkeypatch):
    monkeypatch.setattr(balance, "seconds_of", lambda model, rows, t, comm: 0.1 * (1 + comm.rank))
    assert on_all_ranks(2, lambda comm: measured_shares(model_of(), CONFIG, comm)) == [[8, 4], [8, 4]]
    monkeypatch.undo()
    (first, second) = on_all_ranks(2, lambda comm: balance.seconds_of(model_of(), 6, CONFIG, comm))
    assert 0 < first < 10 and 0 < second < 10


def test_known_shares_are_reused_if_they_fit():
    known = partial(shares_so_far, State(3, ranks=2, shares=[8, 4], hosts=7))
    assert known(CONFIG, 2, 7) == [8, 4] and known(CONFIG, 3, 7) is None
    assert known(CONFIG, 2, 8) is None and known(replace(CONFIG, grad_accum=4), 2, 7) is None
    assert shares_so_far(State(), CONFIG, 2, 7) is None
    first, other = (on_all_ranks(2, lambda comm, n=n: hosts_checksum(comm, n + comm.rank)) for n in (1, 2))
    assert first[0] == first[1] != other[0]


@slow_ranks
def test_run_measures_and_keeps_shares(tmp_path):
    words = ["--schedule", "constant", "--balance", "auto", "--batch-size", "8"]
    commands = [
        ["train", *SMALL, "--stage", "mpi", "--out", tmp_path, "--steps", steps, *words, *more]
        for steps, more in (("3", ()), ("5", ("--resume", "auto")))
    ]
    result = [distgpt(*command, ranks=2) for command in commands]
    assert [each.returncode for each in result] == [0, 0], result
    assert "measured now" in result[0].stdout and "as before" in result[1].stdout
    states = [load_state(path) for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert [state.shares for state in states] == [states[0].shares] * 2
    assert sum(states[0].shares) in (8, 4, 2) and len(losses(tmp_path)) == 5


@slow_ranks
def test_two_ranks_resume_in_other_modes_and_sizes(tmp_path):
    words = ["--n-embd", "64", "--schedule", "constant", "--save-every", "3"]
    local = ["--schedule", "constant", "--outer-every", "4", "--val-fraction", "0.2", "--eval-every", "3"]
    runs = [("whole", ["--steps", "9", *words]), ("local", ["--steps", "12", *local])]
    runs += [("halves", ["--steps", "8", *local]), ("halves", ["--steps", "12", "--resume", "auto", *local])]
    for first, then in (("sharded", "sharded"), ("allreduce", "sharded"), ("sharded", "overlapped")):
        name = f"{first}-{then}"
        runs.append((name, ["--steps", "5", "--grad-sync", first, *words]))
        runs.append((name, ["--steps", "9", "--resume", "auto", "--grad-sync", then, *words]))
    trained_together(2, [(tmp_path / name, args) for name, args in runs])
    whole = losses(tmp_path / "whole")
    assert all(losses(out) == whole for out in tmp_path.glob("*-*"))
    assert losses(tmp_path / "halves") == losses(tmp_path / "local")
    assert [*validations(tmp_path / "local")] == [0, 4, 8, 12]
    for name, steps, args in (("sharded-sharded", 12, words), ("local", 14, local)):
        run = train(tmp_path / name, "--steps", str(steps), "--resume", "auto", *args)
        assert len(losses(run)) == steps and (name == "local" or losses(run)[:9] == whole)


@slow_ranks
def test_four_ranks_on_two_nodes_match(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", "2")  # MPICH's
    bits = ["--steps", "20", "--reproducible-parts", "4", "--val-fraction", "0.2"]
    ways = {"alone": ["--grad-sync", "sharded"], "levels": [], "narrow": ["--gradient-dtype", "bfloat16"]}
    runs = [(tmp_path / name, ["--steps", "16", *args]) for name, args in ways.items()]
    trained_together(4, [*runs, (tmp_path / "four", [*bits, "--grad-accum", "1"])])
    alone, levels, narrow = (np.array(losses(tmp_path / name)) for name in ways)
    assert abs(levels / alone - 1).max() < 1e-5 and 0 < abs(narrow / alone - 1).max() < 1e-2
    names = [summary(tmp_path / name)["allreduce"] for name in ways]
    assert names == ["sharded", "hierarchical", "hierarchical, bfloat16"]
    trained_together(2, [(tmp_path / "two", [*bits, "--grad-accum", "2"])])
    train(tmp_path / "one", *bits, "--threads", "2")
    same = [tmp_path / name for name in ("one", "two", "four")]
    assert len({read_header(run / "weights.safetensors").metadata[DATA_SUM] for run in same}) == 1
    assert len({str(losses(run)) for run in same}) == 1 and len(losses(same[0])) == 20


def test_shared_rows_are_page_aligned_and_zero():
    for columns, dtype in product((1, 1024, 5000), (np.float32, np.float64)):
        for rows in on_all_ranks(3, lambda comm, c=columns, d=dtype: shared_rows(comm, c, np.dtype(d))):
            assert rows.dtype == dtype and rows.shape[0] == 3 and rows.shape[1] >= columns
            assert not rows.any() and rows.strides[0] % os.sysconf("SC_PAGESIZE") == 0
            assert rows.ctypes.data % os.sysconf("SC_PAGESIZE") == 0


def shares_memory(comm, **how):
    model, said = model_of(ranks=comm.size), []
    Chosen(replace(CONFIG, **how), comm.size).make_gradients(comm, model, said.append)
    return type(model.grads) is SharedGradients, said


@pytest.mark.parametrize("ranks, per_node, how, shares", [
    (2, 2, {}, True),
    (2, 2, {"reproducible_parts": 8}, True),
    (4, 2, {"gradient_dtype": "bfloat16"}, True),
    (4, 2, {}, True),
    (4, 2, {"reproducible_parts": 8}, False),
    (2, 1, {}, False),
    (1, 1, {}, False),
    (2, 2, {"grad_sync": "sharded"}, False),
    (2, 2, {"gradient_dtype": "bfloat16"}, False),
])  # fmt: skip
def test_ranks_share_memory_for_suitable_settings(ranks, per_node, how, shares):
    found = on_all_ranks(ranks, lambda comm: shares_memory(comm, **how), per_node)
    assert found == [(shares, [])] * ranks


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("call, error, words", [
    ("memfd_create", OSError(1, "Operation not permitted"), "Operation not permitted"),
    ("memfd_create", None, "this system has no memfd_create"),
    ("open", FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
    ("ftruncate", OSError(27, "File too large"), "File too large"),
    ("getrlimit", None, "ulimit -v"),  # each rank maps all rows
])  # fmt: skip
def test_ranks_without_shared_memory_use_mpi(monkeypatch, call, error, words):
    def fail(*args):
        raise error

    if call == "getrlimit":
        monkeypatch.setattr(resource, call, lambda which: (1 << 40, resource.RLIM_INFINITY))
    elif error:
        monkeypatch.setattr(os, call, fail)
    else:
        monkeypatch.delattr(os, call)
    gc.collect()  # releases descriptors of earlier tests
    descriptors = open_files()
    for shared, said in on_all_ranks(2, shares_memory):
        assert not shared and len(said) == 1 and words in said[0]
    gc.collect()
    assert open_files() == descriptors
    for work, *_ in on_all_ranks(2, trained):
        assert work.gradient_sync.name == "allreduce"


def test_nodes_share_memory_only_if_all_can(monkeypatch):
    """Otherwise the nodes' MPI calls would differ."""
    here, real = threading.local(), os.memfd_create

    def fails_on_the_second_node(name):
        if here.rank > 1:
            raise OSError(1, "Operation not permitted")
        return real(name)

    def act(comm):
        here.rank = comm.rank
        shared, said = shares_memory(comm)
        return shared, len(said)

    monkeypatch.setattr(os, "memfd_create", fails_on_the_second_node)
    assert on_all_ranks(4, act, per_node=2) == [(False, 1)] * 4


def test_foreign_file_descriptor_is_rejected(monkeypatch):
    """Ranks in separate containers can have equal process IDs."""
    real, other = os.open, os.memfd_create("another")
    monkeypatch.setattr(os, "open", lambda *args: real(f"/proc/self/fd/{other}", *args[1:]))
    try:
        for error in on_all_ranks(2, lambda comm: shared_rows(comm, 10, np.dtype(np.float32))):
            assert isinstance(error, UsageError) and "separate process IDs" in str(error)
    finally:
        os.close(other)


SPLIT_TWICE = r"""
from distgpt.core.comm.mpi import MpiComm
comm = MpiComm()
node, peers = levels = comm.split_by_node()
again = comm.split_by_node()
line = f"{node.size} {peers.size} {again[0] is node} {again[1] is peers}\n"
print(line, end="")  # in one write also where output is unbuffered, between those of other ranks
"""


@ci_ranks
def test_ranks_are_split_by_node_once(monkeypatch):
    """MPICH has 2,048 communicators, and these are never freed."""
    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", "2")  # MPICH's
    words = [MPIRUN, "-n", "4", sys.executable, "-c", SPLIT_TWICE]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines() == ["2 2 True True"] * 4, run.stderr

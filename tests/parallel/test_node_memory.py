"""Gradients of a node's ranks lie in memory that all of them share, and are summed there in a fixed order."""

import gc
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.memory import Layout, Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.parallel.choose import Chosen
from distgpt.parallel.node_memory import SharedGradients, SharedSum, gradients_in_node, shared_rows
from distgpt.parallel.reductions import hierarchical
from test_gradsync import CONFIG, MODEL, trained
from test_same_bits import by_twos
from threadranks import on_all_ranks

from conftest import MPIRUN, losses, needs_mpi

BORDER = 3  # elements before and after what is summed, which are to stay as they are


def gradients(rank, size):
    """Numbers whose sum depends on the order in which they are added."""
    return (np.random.default_rng(rank).standard_normal(size) * 10.0 ** (rank % 4)).astype(np.float32)


def in_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def summed(comm, size, threads=1, twos=False, steps=1):
    """Every step's sums of a rank."""
    k = CpuKernels(threads=threads)
    grads = gradients_in_node(comm, k, print, Layout([Spec("w", (size + 2 * BORDER,))]), 0)
    way, found = SharedSum(comm, grads.rows, k.each, k.threads, twos), []
    for step in range(steps):
        grads.flat[: size + 2 * BORDER] = gradients(comm.rank, size + 2 * BORDER)
        time.sleep(np.random.default_rng([comm.rank, step]).random() * 0.002)  # ranks come in any order
        way.sum(BORDER, BORDER + size, step)
        found.append(grads.flat[: size + 2 * BORDER].copy())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks_or_by_twos(ranks):
    for size, threads in product((0, 1, 5, 40, 5003, 70001), (1, 3)):
        rows = np.stack([gradients(rank, size + 2 * BORDER) for rank in range(ranks)])
        ways = [(False, in_order)] + [(True, by_twos)] * (ranks & (ranks - 1) == 0)
        for twos, reference in ways:
            how = size, threads, twos
            for rank, (flat,) in enumerate(on_all_ranks(ranks, lambda comm, how=how: summed(comm, *how))):
                wanted = rows[rank].copy()
                wanted[BORDER : BORDER + size] = reference(rows)[BORDER : BORDER + size]
                assert (flat == wanted).all(), (how, rank)
    if ranks > 2:
        assert (in_order(rows) != rows.astype(np.float64).sum(0).astype(np.float32)).any(), "order matters"


def test_a_step_does_not_overwrite_what_another_rank_still_sums():
    wanted = in_order([gradients(rank, 40 + 2 * BORDER) for rank in range(3)])[BORDER:-BORDER]
    for each in on_all_ranks(3, lambda comm: summed(comm, 40, steps=200)):
        assert all((flat[BORDER:-BORDER] == wanted).all() for flat in each)


@pytest.mark.parametrize("ranks, per_node", [(4, 2), (6, 3), (6, 2)])
def test_nodes_sum_in_memory_first_and_then_the_sums_of_nodes(ranks, per_node):
    def act(comm, size):
        grads = gradients_in_node(comm, CpuKernels(), print, Layout([Spec("w", (size,))]), 0)
        grads.flat[:size] = gradients(comm.rank, size)
        k = CpuKernels()
        way = hierarchical(
            comm, grads.flat, "float32", None, lambda node: SharedSum(node, grads.rows, k.each, k.threads)
        )
        way.sum(0, size, 0)
        return grads.flat[:size].copy()

    for size in (1, 5, 100, 5003):
        rows = [gradients(rank, size) for rank in range(ranks)]
        nodes = [in_order(rows[first : first + per_node]) for first in range(0, ranks, per_node)]
        for found in on_all_ranks(ranks, lambda comm, size=size: act(comm, size), per_node):
            assert (found == in_order(nodes)).all()


def test_rows_begin_at_pages_and_are_zero_and_of_the_kind_that_was_asked_for():
    for columns, dtype in product((1, 1024, 5000), (np.float32, np.float64)):
        for rows in on_all_ranks(3, lambda comm, c=columns, d=dtype: shared_rows(comm, c, np.dtype(d))):
            assert rows.dtype == dtype and rows.shape[0] == 3 and rows.shape[1] >= columns
            assert not rows.any() and rows.strides[0] % os.sysconf("SC_PAGESIZE") == 0
            assert rows.ctypes.data % os.sysconf("SC_PAGESIZE") == 0


# -- which runs do so


@pytest.mark.parametrize(
    "ranks, per_node, how, shares",
    [
        (2, 2, {}, True),
        (2, 2, {"reproducible_parts": 8}, True),
        (4, 2, {"gradient_dtype": "bfloat16"}, True),
        (4, 2, {}, True),
        (4, 2, {"reproducible_parts": 8}, False),
        (2, 1, {}, False),
        (1, 1, {}, False),
        (2, 2, {"grad_sync": "sharded"}, False),
        (2, 2, {"gradient_dtype": "bfloat16"}, False),
    ],
)
def test_ranks_of_a_node_share_memory_where_they_sum_by_themselves(ranks, per_node, how, shares):
    def act(comm):
        model = Model(Architecture(MODEL), CpuKernels())
        model.allocate_master_weights(comm.size)
        Chosen(replace(CONFIG, **how), comm.size).make_gradients(comm, model, print)
        return type(model.grads) is SharedGradients

    assert on_all_ranks(ranks, act, per_node) == [shares] * ranks


def test_training_has_the_bits_of_a_sum_in_the_order_of_the_ranks(monkeypatch):
    """`ThreadComm.sum` adds in that order, too."""
    found = on_all_ranks(4, lambda comm: trained(comm))
    monkeypatch.setattr(Chosen, "make_gradients", lambda self, comm, model, say: model.make_gradients())
    plain = on_all_ranks(4, lambda comm: trained(comm))
    assert [each[0].tobytes() for each in found] == [each[0].tobytes() for each in plain]
    assert [each[2] for each in found] == [each[2] for each in plain]


# -- where it cannot be


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(
    "call, error, words",
    [
        ("memfd_create", OSError(1, "Operation not permitted"), "Operation not permitted"),
        ("memfd_create", None, "this system has no memfd_create"),
        ("open", FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
        ("ftruncate", OSError(27, "File too large"), "File too large"),
    ],
)
def test_ranks_that_cannot_share_memory_say_so_and_mpi_sums(monkeypatch, call, error, words):
    wanted = on_all_ranks(2, lambda comm: trained(comm))

    def fail(*args):
        raise error

    if error:
        monkeypatch.setattr(os, call, fail)
    else:
        monkeypatch.delattr(os, call)
    said = [[], []]

    def act(comm):
        model = Model(Architecture(MODEL), CpuKernels())
        model.allocate_master_weights(comm.size)
        Chosen(CONFIG, comm.size).make_gradients(comm, model, said[comm.rank].append)
        return type(model.grads) is not SharedGradients

    gc.collect()  # earlier tests' memory, each piece of which has a descriptor
    descriptors = open_files()
    assert on_all_ranks(2, act) == [True, True]
    line = f"MPI sums gradients within a node: its ranks cannot share memory ({words})"
    assert [len(each) for each in said] == [1, 1] and all(line in each[0].replace("rank 1: ", "") for each in said)
    gc.collect()
    assert open_files() == descriptors
    found = on_all_ranks(2, lambda comm: trained(comm))
    assert [each[0].tobytes() for each in found] == [each[0].tobytes() for each in wanted]


def test_ranks_of_limited_address_space_share_no_memory(monkeypatch):
    """Each maps the rows of all: what it may map is counted for gradients of its own."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, resource.RLIM_INFINITY))
    said = [[], []]

    def act(comm):
        layout = Layout([Spec("w", (100,))])
        grads = gradients_in_node(comm, CpuKernels(), said[comm.rank].append, layout, 0)
        return type(grads) is SharedGradients

    assert on_all_ranks(2, act) == [False, False]
    assert "ulimit -v" in said[0][0] and said[0] == said[1]


def test_no_node_shares_memory_where_another_one_cannot(monkeypatch):
    """Ranks on both would make other calls of MPI."""
    here, real = threading.local(), os.memfd_create

    def fails_on_the_second_node(name):
        if here.rank > 1:
            raise OSError(1, "Operation not permitted")
        return real(name)

    def act(comm):
        here.rank, said = comm.rank, []
        layout = Layout([Spec("w", (100,))])
        grads = gradients_in_node(comm, CpuKernels(), said.append, layout, 0)
        return type(grads) is SharedGradients, len(said)

    monkeypatch.setattr(os, "memfd_create", fails_on_the_second_node)
    assert on_all_ranks(4, act, per_node=2) == [(False, 1)] * 4


def test_another_process_s_file_of_the_same_number_is_not_taken_for_it(monkeypatch):
    """Ranks in containers of their own number their processes alike."""
    real, other = os.open, os.memfd_create("another")
    monkeypatch.setattr(os, "open", lambda *args: real(f"/proc/self/fd/{other}", *args[1:]))
    try:
        for error in on_all_ranks(2, lambda comm: shared_rows(comm, 10, np.dtype(np.float32))):
            assert isinstance(error, UsageError) and "processes of their own" in str(error)
    finally:
        os.close(other)


# -- real ranks


def from_memory(run):
    return json.loads((run / "summary.json").read_text())["allreduce"]


SPLIT_TWICE = r"""
from distgpt.core.comm.mpi import MpiComm
comm = MpiComm()
node, peers = levels = comm.split_by_node()
again = comm.split_by_node()
line = f"{node.size} {peers.size} {again[0] is node} {again[1] is peers}\n"
print(line, end="")  # in one write also where output is unbuffered, between those of other ranks
"""


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_ranks_are_split_by_node_once(monkeypatch):
    """Communicators are few (MPICH has 2048), and none of these is freed."""
    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", "2")  # MPICH's
    run = subprocess.run(
        [MPIRUN, "-n", "4", sys.executable, "-c", SPLIT_TWICE], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.splitlines() == ["2 2 True True"] * 4, run.stderr


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_runs_of_three_ranks_repeat_and_resume_to_the_bit(tmp_path):
    from test_mpi import trained_together

    words = ["--steps", "9", "--batch-size", "9", "--schedule", "constant", "--save-every", "3"]
    runs = [(tmp_path / name, words) for name in ("one", "two")]
    runs += [(tmp_path / "cut", [*words, "--steps", "4"]), (tmp_path / "cut", [*words, "--resume", "auto"])]
    trained_together(3, runs)
    whole = (tmp_path / "one" / "weights.safetensors").read_bytes()
    for name in ("two", "cut"):
        assert losses(tmp_path / name) == losses(tmp_path / "one")
        assert (tmp_path / name / "weights.safetensors").read_bytes() == whole
        assert from_memory(tmp_path / name) == "shared memory"

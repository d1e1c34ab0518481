"""Shared memory for the gradients of a node's ranks; test_gradsync.py tests the sums."""

import gc
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.parallel.choose import Chosen
from distgpt.parallel.node_memory import SharedGradients, shared_rows
from steps import CONFIG, model_of, trained
from threadranks import on_all_ranks

from conftest import MPIRUN, ci_ranks


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

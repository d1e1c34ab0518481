"""How ranks share a step: what the settings choose, and that all ranks choose alike."""

import inspect
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import get_type_hints

import pytest
from threadranks import on_all_ranks

from distgpt import components
from distgpt.core.base.errors import UsageError
from distgpt.core.base.tables import imported
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.config.settings import GRAD_SYNCS
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.train.sharing import Placement, Strategy, agree_on_strategy
from distgpt.parallel import choose
from distgpt.parallel.choose import Chosen

PLAIN = TrainConfig(batch_size=8, grad_accum=2)


def test_every_component_is_there_and_has_the_types_of_the_table():
    for path in components.PLACEMENTS.values():
        kind = imported(path, path)
        assert issubclass(kind, Placement) and kind(PLAIN, 2).name in components.PLACEMENTS
        for name, method in inspect.getmembers(Placement, inspect.isfunction):
            own = get_type_hints(getattr(kind, name))
            assert name == "own" or own == get_type_hints(method), (path, name)
    tables = (
        (components.MICRO_BATCHES, choose.MakeMicroBatches),
        (choose.exchanges(), choose.MakeExchange),
    )
    for table, kind in tables:
        *wanted, result = kind.__args__
        for path in table.values():
            types = get_type_hints(imported(path, path))
            assert types.pop("return") is result, path
            assert list(types.values()) == wanted, path


def test_only_what_does_not_go_together_has_no_name():
    """Each of the three is chosen apart: a placement does not say how micro-batches add up."""
    for sync, outer, wire in product(GRAD_SYNCS, (0, 4), ("float32", "bfloat16")):
        t = replace(PLAIN, grad_sync=sync, outer_every=outer, gradient_dtype=wire)
        placement, micro_batches, exchange = Chosen(t, 2).names()
        assert placement == ("local steps" if outer else "sharded" if sync == "sharded" else "replicas")
        assert micro_batches == "even"
        others = sync if sync != "allreduce" or wire == "float32" else "in parts"
        assert exchange == ("local steps" if outer else others)
        assert exchange in (*choose.exchanges(), "allreduce")
        assert Chosen(t, 1).names() == ["replicas", "even", sync]
    parts = replace(PLAIN, reproducible_parts=8, grad_sync="sharded")
    assert Chosen(parts, 2).names() == ["sharded", "reproducible parts", "sharded"]
    assert Chosen(replace(PLAIN, balance="auto"), 2).names() == ["replicas", "balanced", "allreduce"]
    assert Chosen(PLAIN, 2).names() == Strategy(PLAIN, 2).names()


def test_ranks_that_choose_differently_do_not_start():
    def refusal(comm, *different):
        t = replace(PLAIN, grad_sync="sharded" if comm.rank in different else "allreduce")
        try:
            agree_on_strategy(comm, Chosen(t, comm.size))
        except UsageError as error:
            return str(error)

    (found,) = set(on_all_ranks(3, lambda comm: refusal(comm, 1)))
    assert "ranks 0, 2: replicas, even, allreduce; rank 1: sharded, even, sharded" in found
    assert on_all_ranks(3, refusal) == [None] * 3


def test_only_what_was_chosen_is_compiled_before_the_first_step():
    called = []

    class Watched(CpuKernels):
        def nesterov(self, *args):
            called.append("the outer step")
            super().nesterov(*args)

        def each(self, *args):
            called.append("a tree")
            super().each(*args)

    model = Model(
        Architecture(ModelConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=2, n_embd=32)),
        Watched(threads=1),
    )
    model.allocate_master_weights()
    for how, ranks, wanted in (
        ({}, 2, set()),
        ({"outer_every": 2}, 1, set()),
        ({"outer_every": 2}, 2, {"the outer step"}),
        ({"reproducible_parts": 4}, 1, {"a tree"}),
    ):
        called.clear()
        Chosen(replace(PLAIN, **how), ranks).rehearse(model)
        assert set(called) == wanted, how


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_run_imports_no_component(ranks):
    code = f"""
import sys
from distgpt import api
from distgpt.core.config import TrainConfig
from distgpt.parallel.choose import Chosen
Chosen(TrainConfig(), {ranks}).names()
print(*sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    paths = {**components.PLACEMENTS, **choose.exchanges()}.values()
    files = {path.partition(":")[0] for path in paths} - {"distgpt.parallel.reductions"}
    assert not loaded & files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_needs_no_loop_that_was_not_there_before_the_first_step(dtype):
    code = f"""
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.train.sampling import sample
from distgpt.core.components import components
from distgpt.core.train.setup import rehearse
from distgpt.core.train.sharing import Strategy
run = RunConfig(ModelConfig(vocab_size=256, seq_len=8, n_layer=2, n_head=2, n_embd=32), TrainConfig())
kernels = open_stage("serial").kernels("{dtype}", "auto", "training")
rehearse(kernels, run, Strategy(run.train, 1))
model = kind_of(run.train).build(run, kernels)
model.allocate_master_weights()
model.initialise(0)
before = set(disk_cache.used)
sample(model, load_tokenizer("byte"), 0, length=4)
print(len(before) > 20, disk_cache.used - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "True set()", result.stdout

"""How ranks share a step: what the settings choose."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from distgpt.core.components import components
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.config.settings import GRAD_SYNCS
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.train.sharing import MicroBatches, Placement, Strategy
from distgpt.parallel.choose import Chosen
from distgpt.parallel.local_steps import LocalPlacement
from distgpt.parallel.reproducible import ReproducibleParts
from distgpt.parallel.sharded import ShardedPlacement

PLAIN = TrainConfig(batch_size=8, grad_accum=2)
SMALL = ModelConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=2, n_embd=32)


def test_placement_micro_batches_and_exchange_are_chosen_apart():
    model = Model(Architecture(SMALL), CpuKernels("float32"))
    model.allocate_master_weights()
    model.make_gradients()
    for sync, outer, parts in product(GRAD_SYNCS, (0, 4), (0, 8)):
        t = replace(PLAIN, grad_sync=sync, outer_every=outer, reproducible_parts=parts)
        placement = LocalPlacement if outer else ShardedPlacement if sync == "sharded" else Placement
        assert type(Chosen(t, 2).placement) is placement and type(Chosen(t, 1).placement) is Placement
        micro_batches = ReproducibleParts if parts else MicroBatches
        assert type(Chosen(t, 2).micro_batches(t, 0, model)) is micro_batches
    assert type(components().strategy(PLAIN, 1)) is Strategy and type(components().strategy(PLAIN, 2)) is Chosen


def test_only_what_was_chosen_is_compiled_before_the_first_step():
    called = []

    class Watched(CpuKernels):
        def nesterov(self, *args):
            called.append("the outer step")
            super().nesterov(*args)

        def each(self, *args):
            called.append("a tree")
            super().each(*args)

    model = Model(Architecture(SMALL), Watched(threads=1))
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


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_needs_no_loop_that_was_not_there_before_the_first_step(dtype):
    code = f"""
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.generate.engine import sample
from distgpt.core.components import components
from distgpt.core.train.setup import rehearse
from distgpt.core.train.sharing import Strategy
run = RunConfig(ModelConfig(vocab_size=256, seq_len=8, n_layer=2, n_head=2, n_embd=32), TrainConfig())
kernels = open_stage("serial").kernels("{dtype}")
rehearse(kernels, run, Strategy(run.train, 1))
model = components().model(run.train).build(run, kernels)
model.allocate_master_weights()
model.initialise(0)
before = set(disk_cache.used)
sample(model, load_tokenizer("byte"), 0, length=4)
print(len(before) > 20, disk_cache.used - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "True set()", result.stdout

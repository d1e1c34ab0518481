"""Estimated memory matches allocations, and runs that do not fit are rejected with a remedy."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.fused.muon import bytes_of
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import Muon
from distgpt.core.model.optim import AdamW
from distgpt.core.train import memory
from distgpt.core.train.assessment import Scorer, Span
from distgpt.core.train.memory import FRACTION, LIBRARIES, PROGRAM, needed
from distgpt.core.train.parallel_strategy import GradientSync, Strategy
from distgpt.core.train.step import Step

RUN = RunConfig(
    ModelConfig(vocab_size=61, seq_len=32, n_layer=6, n_head=2, n_embd=32),
    TrainConfig(batch_size=16, grad_accum=2, recompute="mlp"),
)
RECOMPUTE = ("none", "mlp", "block")


def with_train(run=RUN, **changes):
    return replace(run, train=replace(run.train, **changes))


def sized(run, kernels, **more):
    return needed(run, kernels, Strategy(run.train, 1), **more)


def fitting(run, kernels, free, where="GPU 0", ranks=1, **more):
    return memory.fitting(run, kernels, Strategy(run.train, ranks), free, where, **more)[0]


class Weighing(CpuKernels):
    taken = 0

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("zeros", "accum_zeros", "scalars", "integers"):
            return found

        def weighed(*about, **more):
            self.taken += (array := found(*about, **more)).nbytes
            return array

        return weighed


def test_needed_memory_matches_allocations():
    for dtype, recompute in product(("float32", "float64"), RECOMPUTE):
        run = with_train(recompute=recompute, dtype=dtype)
        kernels = Weighing(dtype)
        model = Model(Architecture(run.model), kernels)
        model.allocate_master_weights()
        assert sized(run, CpuKernels(dtype)).weights == kernels.taken, (dtype, recompute)
        Step(AdamW(model, run.train), SerialComm(), run.train, GradientSync())
        assert sized(run, CpuKernels(dtype)).total == kernels.taken, (dtype, recompute)


def test_needed_memory_includes_muon_updates():
    muon = with_train(optimizer="muon")
    for dtype, threads in product(("float32", "bfloat16"), (1, 2)):
        kernels = CpuKernels(dtype, threads) if dtype == "float32" else Bfloat16Kernels(threads)
        need, model = sized(muon, kernels), Model(Architecture(RUN.model), kernels)
        (loop, make), kept = kernels.polar, []
        noted = lambda *sizes, make=make, kept=kept: kept.append(make(*sizes)) or kept[-1]  # noqa: E731
        kernels.polar = loop, noted
        model.allocate_master_weights()
        Muon(model, muon.train).step(0, 1.0)
        kernels.polar = loop, make
        assert need.update == sum(map(bytes_of, kept)) > 0
        assert need.total - need.update == need.weights + need.optimizer + need.activations
        assert sized(RUN, kernels).update == 0
    with pytest.raises(UsageError, match="Muon's updates"):
        fitting(muon, kernels, 100_000)


def test_run_that_does_not_fit_names_options():
    kernels = CpuKernels("float32")
    fits = sized(RUN, kernels).total
    assert fitting(RUN, kernels, int(fits / (1 - FRACTION)) + 1).recompute == "mlp"
    with pytest.raises(UsageError, match=r"requires .* on GPU 0, .*omit --recompute and --grad-accum"):
        fitting(RUN, kernels, int(fits * 0.9))
    with pytest.raises(UsageError, match="a smaller model"):
        fitting(with_train(recompute="auto", grad_accum=0), kernels, 100_000)


@pytest.fixture
def queued():
    kernels = CpuKernels("float32")
    kernels.capabilities = replace(kernels.capabilities, is_async=True)
    return kernels


@pytest.mark.parametrize("is_async", [False, True], ids=["program", "libraries"])
def test_fixed_memory_is_reserved(is_async, queued):
    """Large models reserve a fixed amount for the program, and GPUs for libraries."""
    kernels, layers, left = (queued, 48, LIBRARIES) if is_async else (CpuKernels("float32"), 12, PROGRAM)
    large = replace(RUN, model=replace(RUN.model, n_embd=1024, n_layer=layers))
    total = sized(large, kernels).total
    assert total > 5 * LIBRARIES if is_async else FRACTION * total > PROGRAM > 0.06 * total
    assert fitting(large, kernels, total + left + 1).recompute == "mlp"
    with pytest.raises(UsageError, match=" free" if is_async else r"256 MiB"):
        fitting(large, kernels, total + left - 1)
    assert not is_async or fitting(RUN, queued, LIBRARIES // 2).recompute == "mlp"  # a small share still runs


def test_auto_recompute_keeps_fitting_activations(queued):
    auto = with_train(recompute="auto")
    for how in RECOMPUTE:
        enough = int(sized(with_train(recompute=how), queued).total / (1 - FRACTION)) + 1
        assert fitting(auto, queued, enough).recompute == how
    with pytest.raises(UsageError, match="GPU 0"):
        fitting(auto, queued, enough // 2)


def test_micro_batches_are_few_and_fit(monkeypatch):
    kernels = CpuKernels("float32")
    auto = with_train(recompute="auto", grad_accum=0, batch_size=48)
    chosen = {n: with_train(auto, grad_accum=n, recompute="mlp") for n in (1, 3, 48)}
    size = {n: sized(run, kernels).total for n, run in chosen.items()}
    assert size[1] > size[3] > size[48]

    def found(free, run=auto, ranks=1):
        t = fitting(run, kernels, int(free / (1 - FRACTION)) + 1, ranks=ranks)
        return t.grad_accum, t.recompute

    assert found(1 << 40) == (1, "mlp") and found(size[3]) == (3, "mlp")
    assert found(size[48]) == (48, "mlp")  # rather than computing again: fewer sequences
    assert found(1 << 40, chosen[3]) == (3, "mlp")  # set explicitly
    with pytest.raises(UsageError, match="activations of 1 sequence of"):
        found(size[48] // 2)
    assert fitting(auto, kernels, 1 << 40, preferred=48).grad_accum == 48  # the earlier value
    monkeypatch.setattr("distgpt.core.train.memory.TOKENS", 32 * 16)
    assert found(1 << 40) == (3, "mlp") and found(1 << 40, ranks=2) == (2, "mlp")
    odd = with_train(auto, batch_size=67)
    assert found(1 << 40, odd) == (1, "mlp")  # rather one too large than 67 of one sequence


def test_needed_memory_includes_evaluation():
    kernels = Weighing("float32")
    model, span = Model(Architecture(RUN.model), kernels), Span(np.zeros(RUN.model.seq_len + 1, np.uint16))
    Scorer(model, SerialComm()).sums([span])  # allocates the kernels' caches
    before = kernels.taken
    Scorer(model, SerialComm()).sums([span] * 1000)
    need = sized(RUN, CpuKernels("float32"), evaluated=True)
    assert need.evaluation == kernels.taken - before
    assert sized(RUN, CpuKernels("float32")).total == need.total - need.evaluation

"""The mean loss over sequences of many lengths: the same, however they are batched."""

from itertools import product

import pytest
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.ops.kernels import Kernels
from mean_loss import MeanLoss
from threadranks import on_all_ranks

from models import VARIANTS, build, one_by_one, sequences_for


def test_batches_give_the_loss_of_single_sequences():
    for kind, threads in product(("gpt2", "modern", "microgpt"), (1, 2)):
        config = VARIANTS[kind]
        sequences = sequences_for(config)
        expected = one_by_one(build(config, Kernels("float64")), sequences)
        model = build(config, CpuKernels("float64", threads))
        for most in (1, 20, 1 << 14):
            found = MeanLoss(model, most)(sequences)
            assert found == pytest.approx(expected, rel=1e-12), (kind, threads, most)


def test_ranks_that_share_the_work_all_get_the_loss_of_one():
    config = VARIANTS["microgpt"]
    for count in (40, 2):  # of 2 sequences some rank has none
        sequences = sequences_for(config, count)
        expected = one_by_one(build(config, Kernels("float64")), sequences)
        found = on_all_ranks(3, lambda comm, own=sequences: MeanLoss(build(config, Kernels("float64")), 20)(own, comm))
        assert found == [pytest.approx(expected, rel=1e-12)] * 3, count


def test_memory_that_is_kept_serves_larger_and_smaller_work():
    config = VARIANTS["microgpt"]
    sequences, reference = sequences_for(config), build(config, Kernels("float64"))
    for threads in (1, 2):
        kept = MeanLoss(build(config, CpuKernels("float64", threads)), 20)
        for some in (sequences[:7], sequences, sequences[5:8], sequences[-20:]):
            assert kept(some) == pytest.approx(one_by_one(reference, some), rel=1e-12), threads


def test_lists_of_numbers_are_sequences_too():
    model = build(VARIANTS["gpt2"], Kernels("float64"))
    sequences = sequences_for(VARIANTS["gpt2"])
    assert MeanLoss(model)([each.tolist() for each in sequences]) == MeanLoss(model)(sequences)

"""The mean loss over sequences of many lengths: the same, however they are batched."""

from itertools import product

import numpy as np
import pytest
from test_model import VARIANTS, build
from threadranks import on_all_ranks

from distgpt.errors import DataError
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.measure.bench.forward import MeanLoss
from distgpt.model.model import Model
from distgpt.model.passes import Pass


def sequences_for(config, count=40):
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, config.seq_len + 2, count)
    return [rng.integers(0, config.vocab_size, length) for length in lengths]


def one_by_one(model, sequences):
    """Every sequence in a pass of its own, and the mean over all predictions."""
    total = 0.0
    for sequence in sequences:
        work, loss = Pass(model, 1, len(sequence) - 1, training=False), model.kernels.wide_zeros(1)
        work.loss(loss, *(model.kernels.integers(side) for side in (sequence[:-1], sequence[1:])))
        total += float(loss[0]) * (len(sequence) - 1)
    return total / sum(len(sequence) - 1 for sequence in sequences)


def test_batches_give_the_loss_of_single_sequences():
    for kind, threads in product(("gpt2", "modern", "microgpt"), (1, 2)):
        config = VARIANTS[kind]
        sequences = sequences_for(config)
        expected = one_by_one(build(config, ReferenceKernels("float64")), sequences)
        model = build(config, CpuKernels("float64", threads))
        for most in (1, 20, 1 << 14):
            found = MeanLoss(model, most)(sequences)
            assert found == pytest.approx(expected, rel=1e-12), (kind, threads, most)


def test_ranks_that_share_the_work_all_get_the_loss_of_one():
    config = VARIANTS["microgpt"]
    for count in (40, 2):  # of 2 sequences some rank has none
        sequences = sequences_for(config, count)
        expected = one_by_one(build(config, ReferenceKernels("float64")), sequences)
        found = on_all_ranks(
            3, lambda comm, own=sequences: MeanLoss(build(config, ReferenceKernels("float64")), 20)(own, comm)
        )
        assert found == [pytest.approx(expected, rel=1e-12)] * 3, count


def test_memory_that_is_kept_serves_larger_and_smaller_work():
    config = VARIANTS["microgpt"]
    sequences, reference = sequences_for(config), build(config, ReferenceKernels("float64"))
    for threads in (1, 2):
        kept = MeanLoss(build(config, CpuKernels("float64", threads)), 20)
        for some in (sequences[:7], sequences, sequences[5:8], sequences[-20:]):
            assert kept(some) == pytest.approx(one_by_one(reference, some), rel=1e-12), threads


def test_lists_of_numbers_are_sequences_too():
    model = build(VARIANTS["gpt2"], ReferenceKernels("float64"))
    sequences = sequences_for(VARIANTS["gpt2"])
    assert MeanLoss(model)([each.tolist() for each in sequences]) == MeanLoss(model)(sequences)


def test_sequences_that_cannot_be_evaluated_are_refused():
    model = Model(VARIANTS["gpt2"], ReferenceKernels("float64"))
    for sequences, words in (
        ([], "no sequences"),
        ([[1, 2], [3]], "sequence 1 has 1 tokens"),
        ([[1, 2], []], "sequence 1 has 0 tokens"),
        ([[1] * 11], "sequence 0 has 11 tokens: a context of 9 predicts in 10"),
        ([[1, 2], [3, 13]], r"in \[0, 13\)"),
        ([[1, -2]], r"in \[0, 13\)"),
        ([[1, 2.5]], "not float64"),
    ):
        with pytest.raises(DataError, match=words):
            MeanLoss(model)(sequences)

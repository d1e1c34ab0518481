"""The mean loss over sequences of many lengths: the same, however they are batched."""

import numpy as np
import pytest
from test_model import VARIANTS, build

from distgpt.errors import DataError
from distgpt.evaluation.equal_lengths import mean_loss
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.model import Model
from distgpt.passes import Pass


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


@pytest.mark.parametrize("most_tokens", [1, 20, 1 << 14])
@pytest.mark.parametrize("kind", ["gpt2", "modern", "microgpt"])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_give_the_loss_of_single_sequences(kind, most_tokens, threads):
    config = VARIANTS[kind]
    sequences = sequences_for(config)
    expected = one_by_one(build(config, ReferenceKernels("float64")), sequences)
    model = build(config, CpuKernels("float64", threads))
    assert mean_loss(model, sequences, most_tokens) == pytest.approx(expected, rel=1e-12)


def test_lists_of_numbers_are_sequences_too():
    model = build(VARIANTS["gpt2"], ReferenceKernels("float64"))
    sequences = sequences_for(VARIANTS["gpt2"])
    assert mean_loss(model, [each.tolist() for each in sequences]) == mean_loss(model, sequences)


@pytest.mark.parametrize(
    "sequences,words",
    [
        ([], "no sequences"),
        ([[1, 2], [3]], "sequence 1 has 1 tokens"),
        ([[1, 2], []], "sequence 1 has 0 tokens"),
        ([[1] * 11], "sequence 0 has 11 tokens: a context of 9 predicts in 10"),
        ([[1, 2], [3, 13]], r"in \[0, 13\)"),
        ([[1, -2]], r"in \[0, 13\)"),
        ([[1, 2.5]], "not float64"),
    ],
)
def test_sequences_that_cannot_be_evaluated_are_refused(sequences, words):
    model = Model(VARIANTS["gpt2"], ReferenceKernels("float64"))
    with pytest.raises(DataError, match=words):
        mean_loss(model, sequences)

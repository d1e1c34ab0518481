"""The mean loss over sequences of many lengths, through the GPU's kernels."""

import pytest
from devices import cuda_kernels  # noqa: F401
from test_cuda_model import TOLERANCE, alike
from test_equal_lengths import one_by_one, sequences_for
from test_model import VARIANTS

from distgpt.measure.bench.forward import MeanLoss


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["gpt2", "modern", "microgpt"])
def test_the_loss_is_that_of_the_reference(kind, dtype, cuda_kernels):
    model, twin = alike(VARIANTS[kind], cuda_kernels(dtype))
    sequences = sequences_for(VARIANTS[kind])
    expected = one_by_one(twin, sequences)
    assert MeanLoss(model, 40)(sequences) == pytest.approx(expected, rel=TOLERANCE[dtype])

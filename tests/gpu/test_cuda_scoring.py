"""Losses of spans through the GPU's code: validation and HellaSwag on a GPU."""

import numpy as np
import pytest
from devices import cuda_kernels  # noqa: F401
from test_cuda_model import TOLERANCE, alike
from test_model import VARIANTS

from distgpt.comm.serial import SerialComm
from distgpt.evaluation import scoring
from distgpt.evaluation.scoring import Scorer, Span


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_spans_cost_what_the_reference_says(kind, dtype, cuda_kernels, monkeypatch):
    for name in ("AT_A_TIME", "AT_A_TIME_QUEUED"):
        monkeypatch.setattr(scoring, name, 40)  # several batches, the last one not full
    config = VARIANTS[kind]
    model, twin = alike(config, cuda_kernels(dtype))
    random = np.random.default_rng(1)
    lengths = random.integers(2, config.seq_len + 2, 11)
    ids = [random.integers(0, config.vocab_size, length).astype(np.uint16) for length in lengths]
    spans = [Span(some, 1 + i % (len(some) - 1)) for i, some in enumerate(ids)]
    expected = Scorer(twin, SerialComm()).sums(spans)
    found = Scorer(model, SerialComm()).sums(spans)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype])

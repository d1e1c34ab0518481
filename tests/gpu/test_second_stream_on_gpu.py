"""The second stream on a real GPU, whose streams do run beside each other."""

from dataclasses import replace

import numpy as np
import pytest
from devices import ON_GPU, device
from test_second_stream import SHAPES, trained_on

from distgpt.config import GpuConfig
from distgpt.gpu import accelerator
from distgpt.gpu.device import SECOND_STREAM


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_second_stream_changes_no_bit(kind, dtype, monkeypatch):
    on, options = device(deterministic=True), GpuConfig(deterministic=True)
    found = []
    for wanted in ("0", "1"):
        monkeypatch.setenv(SECOND_STREAM, wanted)
        kernels = accelerator.kernels_on(on, dtype, options, print)
        assert kernels.capabilities.has_second_stream == (wanted == "1")
        kernels.capabilities = replace(kernels.capabilities, sums_bias_gradients=False)
        found.append(trained_on(kernels, SHAPES[kind], steps=20))
    np.testing.assert_array_equal(*found)

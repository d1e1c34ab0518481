"""Training steps of the GPU's kernels in many orders of blocks, warps and lanes: not a bit may change."""

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from hostgpu import BACKWARDS, FORWARDS, HostDevice, host_lt
from test_cuda_model import TRAIN, training

from models import VARIANTS

pytestmark = needs_the_processor


@pytest.mark.ci
@pytest.mark.parametrize("config", ["gpt2", "modern"])
def test_no_order_changes_a_bit_of_what_is_learned(config):
    found = []
    for order in (FORWARDS, BACKWARDS, 2):
        on = HostDevice(order=order)
        kernels = CudaKernels(on, LtMatmul(host_lt(on.xp), on), "bfloat16")
        model, optimizer, outcomes = training(kernels, VARIANTS[config], TRAIN, count=2)
        parts = (model.weights, model.params, optimizer.m, optimizer.v)
        found.append(np.concatenate([outcomes.reshape(-1), *(kernels.to_host(part.flat) for part in parts)]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])

"""Tokens are sorted once a micro-batch, for all gradients by token, also where work is repeated."""

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from hostgpu import HostDevice, host_lt

from models import VARIANTS, batch

pytestmark = [needs_the_processor, pytest.mark.ci]

CONFIG = VARIANTS["value embeddings"]  # in the lowest and the highest of three layers


SHAPE = 12, 7  # sequences and tokens: more rows than a block adds up


def recorded(layers, graphs=True):
    """The device, and a function from a seed to the gradients of two micro-batches of it."""
    device = HostDevice(graphs=graphs)
    return device, gradients_by(CudaKernels(device, LtMatmul(host_lt(device.xp), device), "float32"), layers)


def gradients_by(k, layers):
    sort = k.sort_tokens

    def sort_tokens(*args):
        k.sorted = sort(*args)  # whose memory is the same when it is repeated
        return k.sorted

    k.sort_tokens = sort_tokens
    model = Model(Architecture(replace(CONFIG, n_layer=layers)), k)
    model.allocate_master_weights()
    model.initialise(3)
    work = Pass(model, *SHAPE, training=True, recompute="none")
    tokens, targets = map(k.integers, batch(CONFIG, *SHAPE))
    parts = [
        k.record(lambda accumulate=each: work.loss_and_gradients(tokens, targets, 0.5, accumulate))
        for each in (False, True)
    ]

    def gradients(seed):
        for i, part in enumerate(parts):
            for array, host in zip((tokens, targets), batch(CONFIG, *SHAPE, seed=2 * seed + i), strict=True):
                k.put(array, host)
            part()
        return k.to_host(model.grads.with_flags).copy()

    gradients.k = k
    return gradients


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_the_layers_with_value_embeddings_sort_no_tokens_again(layers):
    device, gradients = recorded(layers, graphs=False)
    gradients(0)
    names = [launch.kernel for launch in device.xp.launches]
    assert [names.count(each) for each in ("count_values", "add_up_tiles", "place_rows")] == [2, 2, 2]
    added = [each for each in names if each.startswith("token_gradient") and "across" not in each]
    assert len(added) == 2 * (1 + (layers + 1) // 2)


def test_what_is_repeated_sorts_the_tokens_of_its_own_micro_batch():
    plain, right = recorded(3, graphs=False)[1], gradients_by(Kernels("float64"), 3)
    device, gradients = recorded(3)
    for seed in range(3):  # run, recorded, repeated
        bits, values, found = plain(seed), right(seed), gradients(seed)
        # The stand-in's blocks take turns: sums would be right in a wrong order, too.
        tokens, order = gradients.k.sorted
        own = gradients.k.to_host(tokens)
        np.testing.assert_array_equal(gradients.k.to_host(order), np.argsort(own, kind="stable"))
        np.testing.assert_array_equal(found, bits, err_msg=str(seed))
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-5 * np.abs(values).max())
    device.xp.check()

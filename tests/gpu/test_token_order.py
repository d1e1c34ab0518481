"""Tokens are sorted once a micro-batch, for all gradients by token, also where work is repeated."""

import random
from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from hostgpu import HostDevice
from models import VARIANTS, batch
from test_second_stream import DRAWN, EARLY, LATE, kernels_on

from distgpt.model.model import Model
from distgpt.model.passes import Pass

pytestmark = needs_the_processor

CONFIG = VARIANTS["value embeddings"]  # in the lowest and the highest of three layers


def recorded(layers, graphs=True, aside=False, when=LATE):
    """The device, and a function from a seed to the gradients of two micro-batches of it."""
    config = replace(CONFIG, n_layer=layers)
    device = HostDevice(graphs=graphs)
    device.xp.hasty, device.xp.drawn = when == EARLY, random.Random(5) if when == DRAWN else None
    k = kernels_on(device, "float32", aside)
    model = Model(config, k)
    model.train()
    model.initialise(3)
    work = Pass(model, 3, 7, training=True, recompute="none")
    tokens, targets = map(k.integers, batch(config, 3, 7))
    parts = [
        k.record(lambda accumulate=each: work.loss_and_gradients(tokens, targets, 0.5, accumulate))
        for each in (False, True)
    ]

    def gradients(seed):
        for i, part in enumerate(parts):
            for array, host in zip((tokens, targets), batch(config, 3, 7, seed=2 * seed + i), strict=True):
                k.put(array, host)
            part()
        return k.to_host(model.grads.with_flags).copy()

    return device, gradients


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_the_layers_with_value_embeddings_sort_no_tokens_again(layers):
    device, gradients = recorded(layers, graphs=False)
    gradients(0)
    names = [launch.kernel for launch in device.xp.launches]
    assert [names.count(each) for each in ("count_values", "add_up_tiles", "place_rows")] == [2, 2, 2]
    added = [each for each in names if each.startswith("token_gradient") and "across" not in each]
    assert len(added) == 2 * (1 + (layers + 1) // 2)


@pytest.mark.parametrize("aside", [False, True], ids=["one stream", "two streams"])
def test_what_is_repeated_sorts_the_tokens_of_its_own_micro_batch(aside):
    _, plain = recorded(3, graphs=False)
    expected = [plain(seed) for seed in range(4)]
    for when in (LATE, EARLY, DRAWN)[: 3 if aside else 1]:
        device, gradients = recorded(3, aside=aside, when=when)
        for seed, wanted in enumerate(expected):  # run, recorded, repeated twice
            np.testing.assert_array_equal(gradients(seed), wanted, err_msg=f"{when} {seed}")
        device.xp.check()

"""Flat buffers of more than 2³¹ elements: what kernels are given, without the memory that it would take."""

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.base.errors import UsageError
from distgpt.core.ops.api import AdamConstants, AdamState, NesterovState
from distgpt.gpu import device
from distgpt.gpu.device import BLOCK
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.parallel.loops.sums import dither
from hostgpu import HostDevice, host_lt

pytestmark = needs_the_processor

MANY = (3 << 30) + 5


@pytest.fixture
def kernels():
    on = HostDevice()
    return CudaKernels(on, LtMatmul(host_lt(on.xp), on), "bfloat16")


@pytest.fixture
def started(kernels, monkeypatch):
    """What would be started: kernel, blocks, and arguments in the types of C."""
    found = []

    def launch(source, kernel, defines, grid, block, args, shared=0):
        found.append((kernel, grid, block, [device._argument(each) for each in args]))

    monkeypatch.setattr(kernels._device, "launch", launch)
    return found


def large(dtype=np.float32):
    """Return an array of one element in memory."""
    return np.broadcast_to(np.zeros((), dtype), (MANY,))


def test_every_operation_on_flat_buffers_takes_more_elements_than_an_int_counts(kernels, started):
    wide, low, one = large(), large(np.uint16), np.zeros(8)
    runs = np.array([[0, MANY, 0, 0]])
    kernels.cast_down(low, wide)
    kernels.subtract(wide, wide, wide)
    kernels.nesterov(NesterovState(wide, low, wide, wide, wide), 0.5, 0.7, 0.9)
    kernels.adamw(AdamState(wide, low, wide, wide, wide, runs), one, one, AdamConstants(0.9, 0.95, 1e-8))
    fours = [each for each in started if each[0] != "adamw_common"]
    assert [each[0] for each in fours] == ["round_to_stored", "subtract", "nesterov", "adamw"]
    for kernel, grid, block, args in fours:
        assert args[-1] == MANY and type(args[-1]) is np.int64, kernel
        assert 4 * grid[0] * block[0] >= MANY > 4 * (grid[0] - 1) * block[0], kernel
    started.clear()
    kernels.sum_squares(one, wide)
    kernels.sum_squares(one, low)
    for kernel, grid, _, args in started:
        if kernel != "add_up":
            assert args[-1] == MANY and 4096 * grid[0] >= MANY > 4096 * (grid[0] - 1), kernel


def test_so_does_muon_s_momentum_whose_sizes_are_in_a_table(kernels, started):
    kernels.muon_momentum([large()], [large()], np.zeros(1), np.zeros(5))
    grid = next(grid for kernel, grid, _, _ in started if kernel == "muon_momentum")
    assert 4096 * grid[0] >= MANY and grid[1] == 1
    (table,) = kernels._tables.values()
    assert kernels.to_host(table).tolist() == [[0, 0, MANY]]


def test_rounding_at_random_behind_the_first_4_billion_elements_is_that_of_the_host(kernels):
    values = np.random.default_rng(1).standard_normal(3 * BLOCK).astype(np.float32)
    x = kernels.wide_zeros(values.size)
    kernels.put(x, values)
    for index, key in ((5, 7), ((1 << 31) + 3, (1 << 31) + 1), ((1 << 32) + 9, (1 << 32) - 1), (3 << 33, 0)):
        expected, found = np.zeros(values.size, np.uint16), kernels.zeros(values.size)
        dither(0, values.size, expected, values, index, key)
        kernels.wire.dither(found, x, index, key)
        np.testing.assert_array_equal(kernels._device.download(found), expected, err_msg=f"{index} {key}")


def test_activations_that_kernels_cannot_count_are_refused_with_what_helps(kernels):
    with pytest.raises(UsageError, match=r"2,147,483,648 elements.*smaller micro-batches"):
        kernels._launcher.each("elementwise", "add", 8, 1 << 31)

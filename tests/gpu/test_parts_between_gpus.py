"""Arrays between GPUs in parts: summed, gathered, exchanged, rounded on their way."""

from functools import partial

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.gpu.kernels import CudaKernels
from distgpt.parallel.node_memory import one_by_one
from distgpt.parallel.reductions import HostWire, ReduceScatterGather
from fakenccl import NcclError
from gpuranks import on_gpus
from threadranks import on_all_ranks

pytestmark = needs_the_processor


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_parts_are_summed_and_gathered_by_all(way):
    """In place, also where there are fewer elements than ranks, and nothing beside the parts is touched.

    The last are parts of any length, as Muon has them, one of which is empty.
    """
    cases = [[0, 77], [3, 35, 77], [3, 3, 3, 77], [0, 16, 32, 48, 77], [0, 32, 32, 40, 41]]

    def act(comm, device, bounds):
        rank = comm.rank
        found = {}
        for dtype in (np.float32, np.float64):
            values = np.arange(80, dtype=dtype) * (rank + 1)
            array = device.zeros((80,), np.dtype(dtype))
            device.upload(array, values)
            if comm.queued:
                comm.queued.reduce(array, bounds)
                summed = device.download(array)
                own = slice(bounds[rank], bounds[rank + 1])
                np.testing.assert_array_equal(summed[own], np.arange(80)[own] * sum(range(comm.size + 1)))
            device.upload(array, values)
            comm.all_gather(array, bounds)
            found[dtype] = device.download(array)
        received, sent = (device.zeros(shape, np.dtype(np.uint16)) for shape in ((comm.size, 9), (80,)))
        device.upload(sent, np.arange(80, dtype=np.uint16) + 100 * rank)
        counts = [5, 0, 9, 7][: comm.size]
        comm.all_to_all(received, sent, [10 * other for other in range(comm.size)], counts)
        taken = device.download(received)
        for other in range(comm.size):
            here = 10 * rank + 100 * other + np.arange(counts[rank])
            np.testing.assert_array_equal(taken[other, : counts[rank]], here)
        return found

    for bounds in cases:
        size = len(bounds) - 1
        for rank, found in enumerate(on_gpus(size, partial(act, bounds=bounds), way)):
            for dtype, array in found.items():
                wanted = np.arange(80, dtype=dtype) * (rank + 1)
                for owner in range(size):
                    part = slice(bounds[owner], bounds[owner + 1])
                    wanted[part] = np.arange(80)[part] * (owner + 1)
                np.testing.assert_array_equal(array, wanted, err_msg=f"{size} ranks, {dtype}")


def test_a_rank_that_calls_in_another_order_fails_on_all():
    def act(comm, device, differs):
        one, other = (device.zeros((8,), np.dtype(np.float32)) for _ in range(2))
        first = (lambda: comm.broadcast(one)) if differs(comm.rank) else (lambda: comm.sum(one))
        for call in (first, lambda: comm.sum(other)):
            call()
        return device.download(other).tolist()

    assert on_gpus(2, lambda comm, device: act(comm, device, lambda rank: False)) == [[0.0] * 8] * 2
    found = on_gpus(2, lambda comm, device: act(comm, device, lambda rank: rank == 1))
    assert all(isinstance(error, NcclError) for error in found), found
    assert any("has called" in str(error) for error in found)


def test_bfloat16_is_rounded_and_summed_as_on_the_processor():
    """To the bit: which way a number is rounded is a function of seed, step, rank and place."""

    def summed(comm, flat, wire):
        ReduceScatterGather(comm, flat, "bfloat16", 3, wire).sum(16, 5000, step=9)

    def act(comm, device):
        kernels = CudaKernels(device, None, "bfloat16")
        array = device.zeros((5003,), np.dtype(np.float32))
        device.upload(array, values(comm.rank))
        summed(comm, array, kernels.wire)
        device.xp.check()
        return device.download(array)

    def values(rank):
        drawn = np.random.default_rng(rank).standard_normal(5003).astype(np.float32)
        drawn[[100, 2000, 4000]] = np.nan, np.inf, -np.inf
        return drawn

    def on_host(comm):
        flat = values(comm.rank)
        summed(comm, flat, HostWire(one_by_one, 1))
        return flat

    for ranks in (1, 2, 3):
        wanted = on_all_ranks(ranks, on_host)
        for way in ("nccl", "host"):
            for found, known in zip(on_gpus(ranks, act, way), wanted, strict=True):
                assert found.tobytes() == known.tobytes(), (ranks, way)

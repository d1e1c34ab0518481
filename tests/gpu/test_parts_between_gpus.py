"""Arrays between GPUs, whole and in parts: summed, gathered, exchanged, rounded on their way, as on the host."""

from functools import partial

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.gpu import transport
from distgpt.gpu.kernels import CudaKernels
from distgpt.parallel.node_memory import one_by_one
from distgpt.parallel.reductions import HostWire, ReduceScatterGather
from fakenccl import NcclError
from gpuranks import on_gpus
from threadranks import on_all_ranks

pytestmark = needs_the_processor


def exchanged(comm, device=None, *, bounds):
    """What a rank has after each kind of exchange, of arrays on its device or the host."""
    found, size, queued = [], comm.size, getattr(comm, "queued", None)
    reduce = (lambda array: queued.reduce(array, bounds)) if queued else comm.sum

    def after(host, exchange):
        array = device.array(host) if device else host.copy()
        exchange(array)
        found.append(device.download(array) if device else array)

    for dtype in (np.float32, np.float64):
        values = np.arange(80, dtype=dtype) * (comm.rank + 1)
        for exchange in (comm.sum, comm.broadcast, lambda array: comm.all_gather(array, bounds)):
            after(values.reshape(8, 10) if exchange == comm.sum else values, exchange)
        after(values, reduce)
        found[-1] = found[-1][bounds[comm.rank] : bounds[comm.rank + 1]]
    sent, counts = np.arange(80, dtype=np.uint16) + 100 * comm.rank, [5, 0, 9, 7][:size]
    going = device.array(sent) if device else sent
    exchange = partial(comm.all_to_all, sent=going, starts=[10 * other for other in range(size)], counts=counts)
    after(np.zeros((size, 9), np.uint16), exchange)
    return found


@pytest.mark.parametrize("way", ["nccl", "host"])
@pytest.mark.parametrize(
    "bounds", [[0, 77], [3, 35, 77], [3, 3, 3, 77], [0, 16, 32, 48, 77], [0, 32, 32, 40, 41]], ids=str
)
def test_parts_are_summed_and_gathered_by_all(way, bounds, monkeypatch):
    """In place, also where there are fewer elements than ranks, and nothing beside the parts is touched.

    The last are parts of any length, as Muon has them, one of which is empty.
    """
    monkeypatch.setattr(transport, "PIECE_BYTES", 100)
    act, size = partial(exchanged, bounds=bounds), len(bounds) - 1
    for found, wanted in zip(on_gpus(size, act, way), on_all_ranks(size, act), strict=True):
        for array, known in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, known)


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

    def summed(comm, device=None):
        drawn = np.random.default_rng(comm.rank).standard_normal(5003).astype(np.float32)
        drawn[[100, 2000, 4000]] = np.nan, np.inf, -np.inf
        flat, wire = drawn, HostWire(one_by_one, 1)
        if device:
            flat, wire = device.array(drawn), CudaKernels(device, None, "bfloat16").wire
        ReduceScatterGather(comm, flat, "bfloat16", 3, wire).sum(16, 5000, step=9)
        if device:
            device.xp.check()
        return device.download(flat) if device else flat

    for ranks in (1, 2, 3):
        wanted = on_all_ranks(ranks, summed)
        for way in ("nccl", "host"):
            for found, known in zip(on_gpus(ranks, summed, way), wanted, strict=True):
                assert found.tobytes() == known.tobytes(), (ranks, way)

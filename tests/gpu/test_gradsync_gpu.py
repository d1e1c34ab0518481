"""Gradients are summed between GPUs in many ways, and the weights are those of one packed sum."""

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.base.errors import UsageError
from distgpt.core.model.model import Architecture
from distgpt.parallel.choose import Chosen
from distgpt.parallel.overlapped import OverlappedNccl
from gpuranks import CONFIG, MODEL, SHARDED, on_gpus, packed, trained
from threadranks import on_all_ranks

pytestmark = needs_the_processor


def same(one, other):
    return all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(one, other, strict=True))


@pytest.mark.ci
@pytest.mark.parametrize("way, dtype", [("nccl", "bfloat16"), ("host", "float32")])
def test_sharded_gives_the_bits_of_packed_on_two_ranks(way, dtype):
    found = on_gpus(2, lambda comm, device: trained(comm, device, replace(SHARDED, dtype=dtype)), way)
    assert same(found, packed(dtype, way)) and (found[0][0] == found[1][0]).all()


@pytest.mark.slow
def test_sharded_is_packed_up_to_rounding_over_five_steps_on_four_ranks():
    """With clipping and two micro-batches, and on the processor what it is on a GPU."""
    whole, sharded = (
        on_gpus(4, lambda comm, device, c=config: trained(comm, device, c, 5)) for config in (CONFIG, SHARDED)
    )
    cpu = on_all_ranks(4, lambda comm: trained(comm, None, SHARDED, 5))
    for others, near in ((whole, 1e-6), (cpu, 1e-4)):
        for (weights, read), (wanted, known) in zip(sharded, others, strict=True):
            assert (weights == sharded[0][0]).all()
            assert abs(weights - wanted).max() <= near * abs(wanted).max()
            np.testing.assert_allclose(read, known, rtol=near)


@pytest.mark.ci
@pytest.mark.parametrize("hasty, graphs", [(False, True), (True, False)])
def test_overlapped_gives_the_bits_of_packed(hasty, graphs, monkeypatch):
    """Whether NCCL's stream does its work as early as it may, or as late."""
    monkeypatch.setattr(OverlappedNccl, "least", 5000)
    seen = []

    def act(comm, device, config):
        begun = comm.queued.on_side_stream
        comm.queued.on_side_stream = lambda work: (seen.append((comm.rank, work.args)), begun(work))
        return trained(comm, device, config)

    overlapped = replace(CONFIG, grad_sync="overlapped")
    found = on_gpus(2, lambda comm, device: act(comm, device, overlapped), hasty=hasty, graphs=graphs)
    assert same(found, packed())
    buckets = [(start, stop) for rank, (start, stop, _) in seen if rank == 0]
    assert len(buckets) == 3 * 3 and buckets[:3] * 3 == buckets
    (start, cut), (again, last), (rest, stop) = buckets[:3]
    assert (start, again, rest, stop) == (0, cut, last, Architecture(MODEL).layout.size)
    assert cut >= 5000 and last - cut >= 5000


@pytest.mark.ci
@pytest.mark.parametrize("hasty, graphs", [(False, True), pytest.param(True, False, marks=pytest.mark.slow)])
def test_overlapped_in_bfloat16_gives_the_bits_of_the_same_buckets_behind_the_pass(hasty, graphs, monkeypatch):
    """Nothing is rounded before it is final, and no bucket takes the memory of the one before."""
    monkeypatch.setattr(OverlappedNccl, "least", 5000)
    config = replace(CONFIG, grad_sync="overlapped", gradient_dtype="bfloat16")

    def one_after_the_other(comm, device):
        comm.queued.on_side_stream = lambda work: work()
        return trained(comm, device, config)

    wanted = on_gpus(2, one_after_the_other, graphs=graphs)
    found = on_gpus(2, lambda comm, device: trained(comm, device, config), hasty=hasty, graphs=graphs)
    assert same(found, wanted) and (found[0][0] == found[1][0]).all()


def test_overlapped_needs_nccl():
    overlapped = replace(CONFIG, grad_sync="overlapped")
    found = on_gpus(2, lambda comm, device: Chosen(overlapped, comm.size).refuse_unable(comm, on_gpu=True), way="host")
    assert all(isinstance(error, UsageError) and "needs NCCL" in str(error) for error in found)
    assert on_gpus(2, lambda comm, device: Chosen(overlapped, comm.size).refuse_unable(comm, on_gpu=True)) == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "sharded", "overlapped"])
def test_bfloat16_on_the_wire_is_near_and_the_same_every_time(mode):
    config = replace(CONFIG, grad_sync=mode, gradient_dtype="bfloat16")
    found = on_gpus(2, lambda comm, device: trained(comm, device, config))
    if mode == "sharded":
        assert same(found, on_gpus(2, lambda comm, device: trained(comm, device, config)))
    assert (found[0][0] == found[1][0]).all() and (found[0][0] != packed()[0][0]).any()
    losses, known = (np.array(each[0][1])[:, 0] for each in (found, packed()))
    assert abs(losses / known - 1).max() < 1e-3
    sent = on_all_ranks(2, lambda comm: trained(comm, None, config))
    np.testing.assert_allclose(found[0][1], sent[0][1], rtol=1e-4)

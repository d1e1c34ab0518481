"""Gradients are summed between GPUs in many ways, and the weights are those of one packed sum.

Ranks are threads, each with a GPU that is not there; NCCL's stand-in compares what they call, in which order.
"""

import traceback
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from devices import needs_the_processor
from fakecupy import FakeCupy
from fakenccl import FakeNccl, Job, NcclError
from hostgpu import HostDevice, host_lt
from threadranks import on_all_ranks

from distgpt.config import ModelConfig, RunConfig, TrainConfig
from distgpt.data.batches import ArrayTokens, Batches
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.exchange import DeviceComm, HostStaged
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.gpu.nccl import Nccl
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.cpu_bfloat16 import Bfloat16Kernels
from distgpt.model.model import Model
from distgpt.saved.modelfile import Description
from distgpt.saved.rundir import RunDirectory
from distgpt.saved.tensors import read_into
from distgpt.training.gradsync.choose import optimizer_for
from distgpt.training.restore import restore
from distgpt.training.saving import Saver
from distgpt.training.step import Step

pytestmark = needs_the_processor
MODEL = ModelConfig(vocab_size=32, seq_len=4, n_layer=2, n_head=2, n_embd=32)
CONFIG = TrainConfig(batch_size=24, grad_accum=2, seed=3, recompute="mlp", clip=0.5)
SHARDED = replace(CONFIG, grad_sync="sharded")


def on_gpus(size, act, way="nccl", hasty=False, graphs=True):
    """What act(comm, device) returned on each rank, or raised."""
    job = Job(size)

    def run(host):
        device = HostDevice(graphs=graphs)
        device.xp.hasty = hasty
        nccl = FakeNccl(job=job, xp=device.xp)
        exchange = Nccl(host, device, nccl) if way == "nccl" else HostStaged(host, device)
        try:
            return act(DeviceComm(host, exchange), device)
        except Exception as error:
            traceback.print_exc()
            job.trouble = job.trouble or f"rank {host.rank} has ended: {error!r}"
            host.meeting.abort()
            return error

    return on_all_ranks(size, run, patience=60)  # kernels may have to be compiled


def work_of(comm, device, config):
    """A step of the small model on such a rank, on the host's processor without a device."""
    if device:
        kernels = CudaKernels(device, LtMatmul(host_lt(device.xp), device, tf32=False), config.dtype)
    else:
        kernels = Bfloat16Kernels() if config.dtype == "bfloat16" else CpuKernels(config.dtype)
    model = Model(MODEL, kernels)
    model.train(comm.size)
    model.initialise(1)
    optimizer = optimizer_for(model, config, comm)
    if optimizer.outer:
        optimizer.outer.begin()
    return Step(model, optimizer, comm, config)


def batches():
    tokens = ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % MODEL.vocab_size)
    return Batches(tokens, MODEL.seq_len, CONFIG.batch_size, CONFIG.seed)


def trained(comm, device, config=CONFIG, steps=5):
    """What all ranks have after some steps, and loss and norm of each step."""
    work = work_of(comm, device, config)
    read = [work.launch(step, batches()).read() for step in range(steps)]
    params = work.model.kernels.to_host(work.model.params.flat)
    if device:
        device.xp.check()
    return params.copy(), read


# -- the ways of an array


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_parts_are_summed_and_gathered_by_all(way):
    """In place, also where there are fewer elements than ranks, and nothing beside the parts is touched."""
    bounds_of = {1: [0, 77], 2: [3, 35, 77], 3: [3, 3, 3, 77], 4: [0, 16, 32, 48, 77]}

    def act(comm, device):
        bounds, rank = bounds_of[comm.size], comm.rank
        found = {}
        for dtype in (np.float32, np.float64):
            values = np.arange(80, dtype=dtype) * (rank + 1)
            array = device.zeros((80,), np.dtype(dtype))
            device.upload(array, values)
            if comm.direct:
                comm.direct.reduce(array, bounds)
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

    for size, bounds in bounds_of.items():
        for rank, found in enumerate(on_gpus(size, act, way)):
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


def test_parts_that_are_not_alike_are_refused():
    def act(comm, device):
        array = device.zeros((80,), np.dtype(np.float32))
        with pytest.raises(ValueError, match="all but the last one must be alike"):
            comm.direct.reduce(array, [0, 32, 48])
        with pytest.raises(ValueError, match="all but the last one must be alike"):
            comm.all_gather(array, [0, 32, 48])

    assert on_gpus(2, act) == [None, None]


# -- steps of training


def same(one, other):
    return all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_sharded_gives_the_bits_of_packed_on_two_ranks(way, dtype):
    packed = on_gpus(2, lambda comm, device: trained(comm, device, replace(CONFIG, dtype=dtype)), way)
    found = on_gpus(2, lambda comm, device: trained(comm, device, replace(SHARDED, dtype=dtype)), way)
    assert same(found, packed) and (found[0][0] == found[1][0]).all()


def test_sharded_is_packed_up_to_rounding_over_many_steps_on_four_ranks():
    """With clipping and two micro-batches, and on the processor what it is on a GPU."""
    packed, sharded, graphless = (
        on_gpus(4, lambda comm, device, c=config: trained(comm, device, c, 50), graphs=graphs)
        for config, graphs in ((CONFIG, True), (SHARDED, True), (SHARDED, False))
    )
    cpu = on_all_ranks(4, lambda comm: trained(comm, None, SHARDED, 50))
    assert same(sharded, graphless)
    for others, near in ((packed, 1e-6), (cpu, 1e-4)):
        for (weights, read), (wanted, known) in zip(sharded, others, strict=True):
            assert (weights == sharded[0][0]).all()
            assert abs(weights - wanted).max() <= near * abs(wanted).max()
            np.testing.assert_allclose(read, known, rtol=near)


# -- files


def saved_at(comm, device, out, config, at=3):
    """Weights, the best ones, and a checkpoint after some steps."""
    work = work_of(comm, device, config)
    for step in range(at):
        work.launch(step, batches())
    directory = RunDirectory(out)
    out.mkdir(exist_ok=True)
    saver = Saver(
        work.model, work.optimizer, directory, Description(RunConfig(model=MODEL), None), config, print, comm
    )
    saver.begin(at, {}, best=True, checkpoint=False)
    saver.on_root(lambda: saver.finish(at, {}))
    saver.on_root(saver.save_weights)


def resumed(comm, device, out, config, at=3, steps=6):
    work = work_of(comm, device, config)
    k = work.model.kernels
    k.put(work.model.weights.flat, np.full(work.model.layout.size, 7.0))
    restore(comm, work.model, work.optimizer, out / "checkpoints" / f"step-{at:08d}")
    read = [work.launch(step, batches()).read() for step in range(at, steps)]
    return k.to_host(work.model.params.flat).copy(), read


@pytest.mark.parametrize("dtype, way", [("float32", "nccl"), ("bfloat16", "nccl"), ("bfloat16", "host")])
def test_what_is_saved_is_what_packed_saves_and_resumes_exactly(dtype, way, tmp_path):
    """Weights in full precision too, of which no rank has all."""
    packed, sharded = (replace(config, dtype=dtype) for config in (CONFIG, SHARDED))
    for name, config in (("packed", packed), ("sharded", sharded)):
        ended = on_gpus(
            2, lambda comm, device, n=name, c=config: saved_at(comm, device, tmp_path / n, c), way
        )
        assert ended == [None, None]
    files = ("best", "weights", "checkpoints/step-00000003/weights", "checkpoints/step-00000003/optimizer")
    for file in files:
        one, other = (tmp_path / name / f"{file}.safetensors" for name in ("packed", "sharded"))
        found = {path: path.read_bytes() for path in (one, other)}
        assert found[one] == found[other], file
    model = Model(MODEL, CpuKernels("float32"))
    read_into(tmp_path / "sharded" / "weights.safetensors", dict(model.weights))
    assert dtype == "float32" or (model.weights.flat.view(np.uint32) & 0xFFFF).any(), "rounded weights"
    whole = on_gpus(2, lambda comm, device: trained(comm, device, packed, 6), way)
    for name, config in product(("packed", "sharded"), (packed, sharded)):
        found = on_gpus(2, lambda comm, device, n=name, c=config: resumed(comm, device, tmp_path / n, c), way)
        for (weights, read), (wanted, known) in zip(found, whole, strict=True):
            assert (weights == wanted).all() and read == known[3:], (name, config.grad_sync)


def test_sharded_runs_move_to_other_numbers_of_ranks_and_stages(tmp_path):
    on_gpus(2, lambda comm, device: saved_at(comm, device, tmp_path / "gpu", SHARDED))
    on_all_ranks(2, lambda comm: saved_at(comm, None, tmp_path / "cpu", SHARDED))
    known = on_gpus(2, lambda comm, device: trained(comm, device, CONFIG, 6))[0][1][3:]
    for ranks, name, config in product((1, 3), ("gpu", "cpu"), (CONFIG, SHARDED)):
        gpus = on_gpus(ranks, lambda comm, d, n=name, c=config: resumed(comm, d, tmp_path / n, c))
        cpus = on_all_ranks(ranks, lambda comm, n=name, c=config: resumed(comm, None, tmp_path / n, c))
        for found in (gpus, cpus):
            for weights, read in found:
                assert (weights == found[0][0]).all()
                np.testing.assert_allclose(read, known, rtol=1e-4)

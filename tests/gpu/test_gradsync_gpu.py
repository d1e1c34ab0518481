"""Gradients are summed between GPUs in many ways, and the weights are those of one packed sum.

Ranks are threads, each with a GPU that is not there; NCCL's stand-in compares what they call, in which order.
"""

import json
import sys
import traceback
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import distgpt, losses, needs_mpi
from devices import SAME, needs_the_processor
from fakenccl import FakeNccl, Job, NcclError
from hostgpu import HostDevice, host_lt
from threadranks import on_all_ranks

from distgpt.config import ModelConfig, RunConfig, TrainConfig
from distgpt.data.batches import ArrayTokens, Batches
from distgpt.errors import UsageError
from distgpt.gpu.exchange import DeviceComm, HostStaged
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.gpu.nccl import Nccl
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.cpu_bfloat16 import Bfloat16Kernels
from distgpt.model.model import Architecture, Model
from distgpt.saved.modelfile import Description
from distgpt.saved.rundir import RunDirectory
from distgpt.saved.tensors import read_into
from distgpt.training.gradsync import schedules
from distgpt.training.gradsync.choose import one_by_one, optimizer_for, refuse_unable
from distgpt.training.gradsync.ways import HostWire, Parts
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
            if not getattr(error, "shared", False):  # the others would wait
                traceback.print_exc()
                job.fail(f"rank {host.rank} has ended: {error!r}")
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


def test_bfloat16_is_rounded_and_summed_as_on_the_processor():
    """To the bit: which way a number is rounded is a function of seed, step, rank and place."""

    def summed(comm, flat, wire):
        Parts(comm, flat, "bfloat16", 3, wire).sum(16, 5000, step=9)

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


@pytest.mark.slow
def test_sharded_is_packed_up_to_rounding_over_many_steps_on_four_ranks():
    """With clipping and two micro-batches, and on the processor what it is on a GPU."""
    packed, sharded = (
        on_gpus(4, lambda comm, device, c=config: trained(comm, device, c, 25))
        for config in (CONFIG, SHARDED)
    )
    cpu = on_all_ranks(4, lambda comm: trained(comm, None, SHARDED, 25))
    for others, near in ((packed, 1e-6), (cpu, 1e-4)):
        for (weights, read), (wanted, known) in zip(sharded, others, strict=True):
            assert (weights == sharded[0][0]).all()
            assert abs(weights - wanted).max() <= near * abs(wanted).max()
            np.testing.assert_allclose(read, known, rtol=near)


@pytest.mark.parametrize("hasty", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_overlapped_gives_the_bits_of_packed(hasty, graphs, monkeypatch):
    """Whether NCCL's stream does its work as early as it may, or as late."""
    monkeypatch.setattr(schedules, "LARGE_BUCKET", 5000)
    seen = []

    def act(comm, device, config):
        beside = comm.direct.sum_beside
        comm.direct.sum_beside = lambda array: (seen.append((comm.rank, array.size)), beside(array))
        return trained(comm, device, config)

    packed = on_gpus(2, lambda comm, device: act(comm, device, CONFIG))
    assert not seen
    overlapped = replace(CONFIG, grad_sync="overlapped")
    found = on_gpus(2, lambda comm, device: act(comm, device, overlapped), hasty=hasty, graphs=graphs)
    assert same(found, packed)
    sizes = [size for rank, size in seen if rank == 0]
    assert len(sizes) == 5 * 3 and sum(sizes) == 5 * Architecture(MODEL).layout.size
    assert min(sizes[:2]) >= 5000 and sizes[:3] * 5 == sizes


def test_overlapped_needs_nccl():
    overlapped = replace(CONFIG, grad_sync="overlapped")
    found = on_gpus(2, lambda comm, device: refuse_unable(overlapped, comm, on_gpu=True), way="host")
    assert all(isinstance(error, UsageError) and "needs NCCL" in str(error) for error in found)
    assert on_gpus(2, lambda comm, device: refuse_unable(overlapped, comm, on_gpu=True)) == [None] * 2


@pytest.mark.parametrize("way, other", [("nccl", "overlapped"), ("host", "chunked")])
def test_auto_tries_what_the_way_allows_and_computes_what_packed_does(way, other, monkeypatch):
    monkeypatch.setattr(schedules, "LARGE_BUCKET", 5000)
    said = []

    def act(comm, device, config, steps=12):
        work = work_of(comm, device, config)
        work.noted = said.append
        read = [work.launch(step, batches()).read() for step in range(steps)]
        return work.model.kernels.to_host(work.model.params.flat).copy(), read

    packed, found = (
        on_gpus(2, lambda comm, device, m=mode: act(comm, device, replace(CONFIG, grad_sync=m)), way)
        for mode in ("packed", "auto")
    )
    assert same(found, packed)
    assert len(set(said)) == 1 and "packed" in said[0] and other in said[0]


@pytest.mark.parametrize("mode", ["packed", "sharded"])
def test_bfloat16_on_the_wire_is_near_and_the_same_every_time(mode):
    packed = on_gpus(2, lambda comm, device: trained(comm, device))
    config = replace(CONFIG, grad_sync=mode, wire="bfloat16")
    found, again = (on_gpus(2, lambda comm, device: trained(comm, device, config)) for _ in range(2))
    assert same(found, again) and (found[0][0] == found[1][0]).all()
    assert (found[0][0] != packed[0][0]).any()
    losses, known = (np.array(each[0][1])[:, 0] for each in (found, packed))
    assert abs(losses / known - 1).max() < 1e-3
    sent = on_all_ranks(2, lambda comm: trained(comm, None, config))
    np.testing.assert_allclose(found[0][1], sent[0][1], rtol=1e-4)


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


# -- whole runs

DRIVER = """
import runpy, sys
sys.path.insert(0, {folder!r})
import hostgpu
hostgpu.install(2)
from distgpt.training import sampling
sampling.sample = lambda *args, **more: ""  # the slowest part on this device
runpy.run_path({ranks!r}, run_name="__main__")
"""


@pytest.mark.slow
@needs_mpi
def test_whole_runs_by_nccl_evaluate_save_and_move_between_modes(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLE_NCCL", "1")
    driver, folder = tmp_path / "driver.py", Path(__file__).parent
    driver.write_text(DRIVER.format(folder=str(folder), ranks=str(folder.parent / "ranks.py")))
    words = [
        "--schedule",
        "constant",
        "--n-layer",
        "1",
        "--seq-len",
        "8",
        "--val-fraction",
        "0.2",
        "--val-tokens",
        "64",
    ]
    words += ["--eval-every", "2", "--dtype", "bfloat16", "--recompute", "mlp"]
    parts = {
        "whole": [("packed", "4")],
        "moving": [("overlapped", "1"), ("sharded", "3"), ("overlapped", "4")],
    }
    commands = []
    for name, runs in parts.items():
        stage = [
            "train",
            *SAME,
            *words,
            "--stage",
            "mpi-cuda",
            "--deterministic",
            "--out",
            str(tmp_path / name),
        ]
        for number, (mode, steps) in enumerate(runs):
            resumed = ["--resume", "auto"] if number else []
            commands.append([*stage, "--steps", steps, "--grad-sync", mode, *resumed])
    result = distgpt(ranks=2, program=[sys.executable, str(driver), json.dumps(commands)], timeout=100)
    assert result.stderr.count("exit code 0") == len(commands), result.stderr
    assert "by way of nccl" in result.stdout
    whole, moving = (tmp_path / name for name in parts)
    assert losses(whole) == losses(moving)
    assert (whole / "weights.safetensors").read_bytes()[-2000:] == (
        moving / "weights.safetensors"
    ).read_bytes()[-2000:]


@needs_mpi
def test_what_is_refused_leaves_no_directory_behind(tmp_path):
    driver, folder = tmp_path / "driver.py", Path(__file__).parent
    driver.write_text(DRIVER.format(folder=str(folder), ranks=str(folder.parent / "ranks.py")))
    words = ["train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8", "--steps", "1"]
    commands = [[*words, "--grad-sync", "overlapped", "--out", str(tmp_path / "run")]]
    result = distgpt(ranks=2, program=[sys.executable, str(driver), json.dumps(commands)], timeout=100)
    assert "exit code 2" in result.stderr and "needs NCCL" in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


FAILING = """
import os, sys, time
sys.path.insert(0, {folder!r})
import hostgpu
hostgpu.install(2)
from distgpt.cli import main
from distgpt.gpu import exchange
from distgpt.training.step import Step
launch = Step.launch

def launched(self, step, batches):
    if step == 2:
        if self.comm.rank:
            exchange.nccl_module().trouble = "remote process exited"
        time.sleep(60)  # as for a sum that never comes
    return launch(self, step, batches)

Step.launch = launched
main()
"""


@needs_mpi
def test_a_failure_of_nccls_ends_the_job_instead_of_a_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLE_NCCL", "1")
    driver = tmp_path / "driver.py"
    driver.write_text(FAILING.format(folder=str(Path(__file__).parent)))
    words = ("train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8", "--steps", "9")
    program = [sys.executable, str(driver)]
    result = distgpt(*words, "--out", tmp_path / "run", ranks=2, program=program, timeout=50)
    assert result.returncode == 70, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")]
    assert "rank 1: NCCL has failed, as it does when another rank or host dies: remote process exited" in line
    assert "Traceback" not in result.stderr

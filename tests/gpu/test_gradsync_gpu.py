import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from devices import SAME, needs_the_processor
from distgpt.core.base.errors import UsageError
from distgpt.core.config import RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.checkpoint import Best, State
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import read_into
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.setup import restore
from distgpt.gpu import transport
from distgpt.gpu.kernels import CudaKernels
from distgpt.parallel.choose import Chosen
from distgpt.parallel.node_memory import one_by_one
from distgpt.parallel.overlapped import OverlappedNccl
from distgpt.parallel.reductions import HostWire, ReduceScatterGather
from fakenccl import NcclError
from gpuranks import CONFIG, MODEL, SHARDED, batches, on_gpus, packed, steps_of, trained, work_of
from threadranks import on_all_ranks

from conftest import ROOT, ci_ranks, distgpt, slow_ranks

pytestmark = needs_the_processor

OVERLAPPED = replace(CONFIG, grad_sync="overlapped")
SLOW = pytest.mark.slow


def same(one, other):
    return all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(one, other, strict=True))


def trained_on(size, config, way="nccl", steps=3, **how):
    return on_gpus(size, lambda comm, device: trained(comm, device, config, steps), way, **how)


@pytest.mark.ci
@pytest.mark.parametrize("way, dtype", [("nccl", "bfloat16"), ("host", "float32")])
def test_sharded_matches_packed_bitwise(way, dtype):
    found = trained_on(2, replace(SHARDED, dtype=dtype), way)
    assert same(found, packed(dtype, way)) and (found[0][0] == found[1][0]).all()


@pytest.mark.ci
@pytest.mark.parametrize("hasty, graphs", [(False, True), (True, False)])
def test_overlapped_matches_packed_bitwise(hasty, graphs, monkeypatch):
    """NCCL's stream works as early as possible, or as late as possible."""
    monkeypatch.setattr(OverlappedNccl, "least", 5000)
    seen = []

    def act(comm, device):
        begun = comm.queued.on_side_stream
        comm.queued.on_side_stream = lambda work: (seen.append((comm.rank, work.args)), begun(work))
        return trained(comm, device, OVERLAPPED)

    assert same(on_gpus(2, act, hasty=hasty, graphs=graphs), packed())
    buckets = [(start, stop) for rank, (start, stop, _) in seen if rank == 0]
    assert len(buckets) == 3 * 3 and buckets[:3] * 3 == buckets
    (start, cut), (again, last), (rest, stop) = buckets[:3]
    assert (start, again, rest, stop) == (0, cut, last, Architecture(MODEL).layout.size)
    assert cut >= 5000 and last - cut >= 5000


@pytest.mark.ci
@pytest.mark.parametrize("hasty, graphs", [(False, True), pytest.param(True, False, marks=SLOW)])
def test_overlapped_bfloat16_equals_sequential_buckets(hasty, graphs, monkeypatch):
    """Only final sums are rounded, and no bucket uses the memory of the previous one."""
    monkeypatch.setattr(OverlappedNccl, "least", 5000)
    config = replace(OVERLAPPED, gradient_dtype="bfloat16")

    def one_after_the_other(comm, device):
        comm.queued.on_side_stream = lambda work: work()
        return trained(comm, device, config)

    found = trained_on(2, config, hasty=hasty, graphs=graphs)
    assert same(found, on_gpus(2, one_after_the_other, graphs=graphs)) and (found[0][0] == found[1][0]).all()


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_overlapped_needs_nccl(way):
    found = on_gpus(2, lambda comm, _: Chosen(OVERLAPPED, comm.size).refuse_unable(comm, on_gpu=True), way)
    assert found == [None] * 2 if way == "nccl" else all(isinstance(error, UsageError) for error in found)


def saved_at(comm, device, out, config, at=2):
    work = work_of(comm, device, config)
    for step in range(at):
        work.launch(step, batches())
    directory = RunDirectory(out)
    out.mkdir(exist_ok=True)
    about, gathering = Description(RunConfig(model=MODEL), None), work.state.gathering(comm)
    saver = Checkpoints(work.model, work.optimizer, directory, about, config, print, comm, gathering=gathering)
    saver.begin(State(at), best=Best(1.0, 1, at), checkpoint=False)
    saver.on_root(lambda: saver.write_now(State(at)))
    saver.on_root(lambda: saver.write_weights(at))


def resumed(comm, device, out, config, at=2, steps=4):
    work = work_of(comm, device, config)
    for spec in work.model.layout.specs:
        work.model.put(spec.name, np.full(spec.shape, 7.0))
    restore(comm, work.state, out / "checkpoints" / f"step-{at:08d}")
    return steps_of(work, range(at, steps))


@pytest.mark.ci
@pytest.mark.parametrize("dtype, way", [("bfloat16", "nccl"), pytest.param("float32", "host", marks=SLOW)])
def test_sharded_saves_and_resumes_like_packed(dtype, way, tmp_path):
    """No rank has all weights in full precision."""
    plain, sharded = (replace(config, dtype=dtype) for config in (CONFIG, SHARDED))
    for name, config in (("allreduce", plain), ("sharded", sharded)):
        ended = on_gpus(2, lambda comm, device, n=name, c=config: saved_at(comm, device, tmp_path / n, c), way)
        assert ended == [None, None]
    for file in ("best", "weights", "checkpoints/step-00000002/weights", "checkpoints/step-00000002/optimizer"):
        one, other = ((tmp_path / name / f"{file}.safetensors").read_bytes() for name in ("allreduce", "sharded"))
        assert one == other, file
    model = Model(Architecture(MODEL), CpuKernels("float32"))
    read_into(tmp_path / "sharded" / "weights.safetensors", dict(model.weights))
    assert dtype == "float32" or (model.weights.flat.view(np.uint32) & 0xFFFF).any(), "rounded weights"
    whole = trained_on(2, plain, way, 4)
    for name, config in (("allreduce", sharded), ("sharded", sharded)):
        found = on_gpus(2, lambda comm, device, n=name, c=config: resumed(comm, device, tmp_path / n, c), way)
        for (weights, read), (wanted, known) in zip(found, whole, strict=True):
            assert (weights == wanted).all() and read == known[2:], (name, config.grad_sync)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rank_keeps_only_its_part_in_full_precision(dtype):
    config = replace(SHARDED, dtype=dtype)

    def act(comm, device):
        work = work_of(comm, device, config)
        model, own = work.model, work.optimizer.own
        kept = {id(flat): flat.nbytes for flat in (model.params.flat, model.weights.flat, model.masters(own))}
        here = model.kernels.to_host(model.masters(own))
        return own, sum(kept.values()), here, model.kernels.to_host(model.params.flat)

    found = on_gpus(2, act)
    size = len(found[0][3])
    assert [own.start for own, *_ in found] == [0, found[0][0].stop] and found[1][0].stop == size
    for own, bytes_kept, here, params in found:
        assert len(here) == own.stop - own.start
        if dtype == "bfloat16":
            assert bytes_kept == 2 * size + 4 * len(here), "and no more"
            assert (here.view(np.uint32) & 0xFFFF).any(), "rounded"
        np.testing.assert_allclose(params[own], here, rtol=2**-8)


def exchanged(comm, device=None, *, bounds):
    """Return a rank's arrays after each kind of exchange, on its device or the host."""
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
def test_parts_are_summed_and_gathered(way, bounds, monkeypatch):
    """Exchanges are in place, also with fewer elements than ranks. The last bounds are Muon's; one part is empty."""
    monkeypatch.setattr(transport, "PIECE_BYTES", 100)
    act, size = partial(exchanged, bounds=bounds), len(bounds) - 1
    for found, wanted in zip(on_gpus(size, act, way), on_all_ranks(size, act), strict=True):
        for array, known in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(array, known)


def test_different_call_order_fails_on_all_ranks():
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


def test_bfloat16_sums_match_host_bitwise():
    """Rounding depends only on seed, step, rank and position."""

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


HERE, BENCHMARKS = Path(__file__).parent, ROOT / "benchmarks"
ON_GPUS = [sys.executable, str(HERE / "hostgpu.py")]
TINY = ["train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8"]
# Each exchange, optimizer and gradient type at least once. test_session.py runs all modes.
MODES = ("overlapped", "sharded", "muon-sharded", "narrow-overlapped", "accumulating", "local")


@ci_ranks
def test_gradient_exchanges_match_host_bitwise(tmp_path):
    words = (BENCHMARKS / "nccl_modes.py", tmp_path, "--quick", "--only", *MODES)
    result = distgpt(*words, ranks=2, program=ON_GPUS, env={"WHOLE_GPU": "1", "WHOLE_NCCL": "1"}, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["mode"]: row for row in json.loads((tmp_path / "modes.json").read_text())}
    by_nccl = {name: row for name, row in rows.items() if not name.startswith("host")}
    assert by_nccl.keys() == set(MODES) and {row["verdict"] for row in by_nccl.values()} == {"same bits"}
    assert len({row["losses"][-1] for row in by_nccl.values()}) > 3, "the modes are not one and the same"
    assert "with nccl" in result.stdout


FAILING = """
import sys, time
sys.path.insert(0, {here!r})
import hostgpu
hostgpu.install(2)
from distgpt.commands.cli import main
from distgpt.gpu import transport
from distgpt.core.train.step import Step
from fakenccl import NcclError
launch = Step.launch

def launched(self, step, batches, *flags):
    if step == 2:
        if self.comm.rank in {ranks}:
            transport.nccl_module().trouble = NcclError("remote process exited")
        time.sleep(60)  # as for a sum that never comes
    return launch(self, step, batches, *flags)

Step.launch = launched
main()
"""


@slow_ranks
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_nccl_failure_ends_the_job_with_one_message(ranks, tmp_path):
    (driver := tmp_path / "driver.py").write_text(FAILING.format(here=str(HERE), ranks=ranks))
    how = {"ranks": 2, "program": [sys.executable, str(driver)], "cold": False, "env": {"WHOLE_NCCL": "1"}}
    result = distgpt(*TINY, "--steps", "9", "--out", tmp_path / "run", timeout=50, **how)
    assert result.returncode == 70, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")]
    assert any(f"rank {rank}: NCCL failed" in line for rank in ranks) and "remote process exited" in line
    assert "Traceback" not in result.stderr

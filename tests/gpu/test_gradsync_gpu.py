"""Gradients are summed between GPUs in many ways: the weights are those of one packed sum, also after resuming."""

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
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
from distgpt.parallel.choose import Chosen
from distgpt.parallel.overlapped import OverlappedNccl
from gpuranks import CONFIG, MODEL, SHARDED, batches, on_gpus, packed, steps_of, trained, work_of
from threadranks import on_all_ranks

pytestmark = needs_the_processor

OVERLAPPED = replace(CONFIG, grad_sync="overlapped")
SLOW = pytest.mark.slow


def same(one, other):
    return all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(one, other, strict=True))


def trained_on(size, config, way="nccl", steps=3, **how):
    return on_gpus(size, lambda comm, device: trained(comm, device, config, steps), way, **how)


@pytest.mark.ci
@pytest.mark.parametrize("way, dtype", [("nccl", "bfloat16"), ("host", "float32")])
def test_sharded_gives_the_bits_of_packed_on_two_ranks(way, dtype):
    found = trained_on(2, replace(SHARDED, dtype=dtype), way)
    assert same(found, packed(dtype, way)) and (found[0][0] == found[1][0]).all()


@pytest.mark.ci
@pytest.mark.parametrize("hasty, graphs", [(False, True), (True, False)])
def test_overlapped_gives_the_bits_of_packed(hasty, graphs, monkeypatch):
    """Whether NCCL's stream does its work as early as it may, or as late."""
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
def test_overlapped_in_bfloat16_gives_the_bits_of_the_same_buckets_behind_the_pass(hasty, graphs, monkeypatch):
    """Nothing is rounded before it is final, and no bucket takes the memory of the one before."""
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["allreduce", "sharded", "overlapped"])
def test_bfloat16_on_the_wire_is_near_and_the_same_every_time(mode):
    config = replace(CONFIG, grad_sync=mode, gradient_dtype="bfloat16")
    found = trained_on(2, config)
    assert mode != "sharded" or same(found, trained_on(2, config))
    assert (found[0][0] == found[1][0]).all() and (found[0][0] != packed()[0][0]).any()
    losses, known = (np.array(each[0][1])[:, 0] for each in (found, packed()))
    assert abs(losses / known - 1).max() < 1e-3
    sent = on_all_ranks(2, lambda comm: trained(comm, None, config))
    np.testing.assert_allclose(found[0][1], sent[0][1], rtol=1e-4)


# -- saved and resumed


def saved_at(comm, device, out, config, at=2):
    """Weights, the best ones, and a checkpoint after some steps."""
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
def test_what_is_saved_is_what_packed_saves_and_resumes_exactly(dtype, way, tmp_path):
    """Weights in full precision too, of which no rank has all."""
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


@pytest.mark.slow
def test_sharded_runs_move_to_other_numbers_of_ranks_and_stages(tmp_path):
    on_gpus(2, lambda comm, device: saved_at(comm, device, tmp_path / "gpu", SHARDED))
    on_all_ranks(2, lambda comm: saved_at(comm, None, tmp_path / "cpu", SHARDED))
    known = trained_on(2, CONFIG, steps=4)[0][1][2:]
    for ranks, name, config in ((3, "gpu", CONFIG), (1, "cpu", CONFIG), (3, "cpu", SHARDED)):
        gpus = on_gpus(ranks, lambda comm, d, n=name, c=config: resumed(comm, d, tmp_path / n, c))
        cpus = on_all_ranks(ranks, lambda comm, n=name, c=config: resumed(comm, None, tmp_path / n, c))
        for found in (gpus, cpus):
            for weights, read in found:
                assert (weights == found[0][0]).all()
                np.testing.assert_allclose(read, known, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_keeps_its_part_alone_in_full_precision(dtype):
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

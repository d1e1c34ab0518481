"""What ranks with GPUs save when each has a part of the moments, and how it resumes."""

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.config import RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.checkpoint import Best, State
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import read_into
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.setup import restore
from gpuranks import CONFIG, MODEL, SHARDED, batches, on_gpus, trained, work_of
from threadranks import on_all_ranks

pytestmark = needs_the_processor


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
    k = work.model.kernels
    for spec in work.model.layout.specs:
        work.model.put(spec.name, np.full(spec.shape, 7.0))
    restore(comm, work.state, out / "checkpoints" / f"step-{at:08d}")
    read = [work.launch(step, batches()).wait()[:2] for step in range(at, steps)]
    return k.to_host(work.model.params.flat).copy(), read


@pytest.mark.ci
@pytest.mark.parametrize("dtype, way", [("bfloat16", "nccl"), pytest.param("float32", "host", marks=pytest.mark.slow)])
def test_what_is_saved_is_what_packed_saves_and_resumes_exactly(dtype, way, tmp_path):
    """Weights in full precision too, of which no rank has all."""
    packed, sharded = (replace(config, dtype=dtype) for config in (CONFIG, SHARDED))
    for name, config in (("allreduce", packed), ("sharded", sharded)):
        ended = on_gpus(2, lambda comm, device, n=name, c=config: saved_at(comm, device, tmp_path / n, c), way)
        assert ended == [None, None]
    files = ("best", "weights", "checkpoints/step-00000002/weights", "checkpoints/step-00000002/optimizer")
    for file in files:
        one, other = (tmp_path / name / f"{file}.safetensors" for name in ("allreduce", "sharded"))
        found = {path: path.read_bytes() for path in (one, other)}
        assert found[one] == found[other], file
    model = Model(Architecture(MODEL), CpuKernels("float32"))
    read_into(tmp_path / "sharded" / "weights.safetensors", dict(model.weights))
    assert dtype == "float32" or (model.weights.flat.view(np.uint32) & 0xFFFF).any(), "rounded weights"
    whole = on_gpus(2, lambda comm, device: trained(comm, device, packed, 4), way)
    for name, config in (("allreduce", sharded), ("sharded", sharded)):
        found = on_gpus(2, lambda comm, device, n=name, c=config: resumed(comm, device, tmp_path / n, c), way)
        for (weights, read), (wanted, known) in zip(found, whole, strict=True):
            assert (weights == wanted).all() and read == known[2:], (name, config.grad_sync)


@pytest.mark.slow
def test_sharded_runs_move_to_other_numbers_of_ranks_and_stages(tmp_path):
    on_gpus(2, lambda comm, device: saved_at(comm, device, tmp_path / "gpu", SHARDED))
    on_all_ranks(2, lambda comm: saved_at(comm, None, tmp_path / "cpu", SHARDED))
    known = on_gpus(2, lambda comm, device: trained(comm, device, CONFIG, 4))[0][1][2:]
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

"""The GPU stages: which rank gets which GPU, what is refused, and ranks that fail while they open theirs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from distgpt.cluster.launch.job import Launched
from distgpt.core.base.errors import UsageError
from distgpt.core.comm import agree
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.gpu import probe
from distgpt.gpu import stage as opening
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.stage import bound, device_of
from distgpt.gpu.transport import DeviceComm, HostStaged, sharing
from fakecupy import FakeCupy
from hostbuild import COMPILER
from launching import SIZES
from threadranks import on_all_ranks

from conftest import distgpt, needs_mpi, refused


def test_ranks_of_a_node_take_its_gpus_in_turn():
    for count, gpus in (1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 2, 0]), (8, [0, 1, 2, 3]):
        assert [device_of(rank, count) for rank in range(4)] == gpus, count


# Opening a stage, with GPUs that are not there


class Rank(SerialComm):
    """One of several ranks on a node."""

    def __init__(self, local_rank, local_size):
        super().__init__()
        self.rank = self.local_rank = local_rank
        self.size = self.local_size = local_size


@pytest.fixture
def node(monkeypatch):
    """A function that says how many GPUs there are and which rank this is; everything asked of it."""
    for launcher in SIZES:
        monkeypatch.delenv(launcher, raising=False)
    asked = {"required": [], "transport": []}
    monkeypatch.setattr(probe, "require_gpu", asked["required"].append)

    def be(gpus, local_rank=0, local_size=1):
        monkeypatch.setattr(opening, "gpu_count", lambda: gpus)
        if local_size > 1:
            monkeypatch.setattr(agree, "gather", lambda comm, value: [value] * comm.size)
            monkeypatch.setattr(Launched, "connect", lambda job, stage: Rank(local_rank, local_size))
            monkeypatch.setattr(Launched, "meet", lambda job, comm: None)  # nobody else is there
        bound = [device_of(rank, gpus) for rank in range(local_size)]
        monkeypatch.setattr(opening, "sharing", lambda comm, device: bound.count(device.index))
        return asked

    def open_device(index, options):
        return CupyDevice(index, options.deterministic, options.graphs, xp=FakeCupy(8, total=141 << 30))

    def choose(how, comm, device):
        asked["transport"].append((how, comm.size, device.sharing))
        return HostStaged(comm, device)

    monkeypatch.setattr(opening, "open_device", open_device)
    monkeypatch.setattr(opening, "choose_transport", choose)
    return be


def notes(stage):
    heard = []
    stage.notes.report_to(heard.append)
    return heard


def test_cuda_opens_the_first_gpu_alone(node):
    asked = node(gpus=4)
    stage = open_stage("cuda")
    assert asked["required"] == ["cuda"] and asked["transport"] == []
    assert (stage.device.index, stage.device.sharing, stage.comm.size) == (0, 1, 1)
    assert notes(stage) == ["GPU 0: Fake GPU, 141 GiB"]


@pytest.mark.parametrize(
    "gpus, local_rank, local_size, index, share",
    [(1, 1, 2, 0, 2), (2, 3, 4, 1, 2), (2, 1, 3, 1, 1), (4, 2, 4, 2, 1), (8, 5, 6, 5, 1)],
)
def test_mpi_cuda_binds_every_rank_to_its_gpu(node, gpus, local_rank, local_size, index, share):
    asked = node(gpus, local_rank, local_size)
    stage = open_stage("mpi-cuda", gpu=GpuConfig(allreduce="host"))
    assert asked == {"required": ["mpi-cuda"], "transport": [("host", local_size, share)]}
    assert stage.device.index == index
    assert isinstance(stage.comm, DeviceComm) and stage.comm.local_rank == local_rank
    first, *others = notes(stage)
    assert first == f"GPU {index}: Fake GPU, 141 GiB"
    assert others == [*([f"{share} ranks share this GPU"] if share > 1 else []), "gradients are summed by way of host"]


def test_ranks_share_the_memory_of_a_gpu(node):
    node(gpus=2, local_rank=0, local_size=3)
    stage = open_stage("mpi-cuda")
    assert stage.free_memory() == (stage.device.memory()[0] // 2, "GPU 0 (Fake GPU)")


def test_stages_without_a_gpu_refuse_its_options():
    for name in ("serial", "mpi"):
        for option in ({"graphs": False}, {"allreduce": "nccl"}, {"tf32": True}):
            with pytest.raises(UsageError, match="cuda and mpi-cuda"):
                open_stage(name, gpu=GpuConfig(**option))


def test_cuda_refuses_to_be_launched_several_times(node, monkeypatch):
    node(gpus=1)
    for launcher in SIZES:
        with monkeypatch.context() as launching:
            launching.setenv(launcher, "2")
            with pytest.raises(UsageError, match=r"launched as 2 processes.*--stage mpi-cuda"):
                open_stage("cuda")


def test_a_gpu_that_is_missing_is_refused_before_anything_is_opened(node, monkeypatch):
    node(gpus=1)

    def refuse(stage):
        raise UsageError(f"stage {stage!r} cannot run here")

    monkeypatch.setattr(probe, "require_gpu", refuse)
    monkeypatch.setattr(opening, "open_device", None)
    with pytest.raises(UsageError, match="'mpi-cuda' cannot run here"):
        open_stage("mpi-cuda")


class Taken(Exception):
    """As CuPy's of a GPU in exclusive mode that another process has, or whose memory is full."""


Taken.__module__ = "cupy_backends.cuda.api.runtime"
SAYS = "cudaErrorDevicesUnavailable: all CUDA-capable devices are busy or unavailable"


def on_two_gpus(monkeypatch, open_gpu, make=lambda device, options: None):
    """What each of two ranks gets or raises that opens its GPU, and kernels on it."""
    monkeypatch.setattr(opening, "gpu_count", lambda: 2)
    monkeypatch.setattr(opening, "CupyDevice", open_gpu)
    monkeypatch.setattr(opening.cublaslt, "load", lambda: SimpleNamespace(version=1))
    monkeypatch.setattr(opening, "LtMatmul", lambda lt, device, tf32: make(device, tf32))

    def act(comm):
        try:
            return bound("mpi-cuda", comm, GpuConfig(allreduce="host")).kernels("float32")
        except UsageError as error:
            assert error.shared
            return str(error)

    return on_all_ranks(2, act)


def device(index, *rest, **how):
    return CupyDevice(index, *rest, xp=FakeCupy(2, total=8 << 30), **how)


def test_a_gpu_that_another_process_has_is_refused_in_one_line_on_all_ranks(monkeypatch):
    def open_gpu(index, *rest, **how):
        if index == 1:
            raise Taken(SAYS)
        return device(index, *rest, **how)

    first, second = on_two_gpus(monkeypatch, open_gpu)
    assert first == second and first.startswith(f"rank 1: GPU 1 cannot be used: {SAYS}; nvidia-smi")


def test_so_is_one_whose_memory_is_full(monkeypatch):
    def make(on, options):
        if on.index == 0:
            raise Taken("Out of memory allocating 67,108,864 bytes")

    first, second = on_two_gpus(monkeypatch, device, make)
    assert first == second and first.startswith("rank 0: GPU 0 cannot be used: Out of memory")


def test_an_error_of_ours_while_a_gpu_is_opened_stays_what_it_is(monkeypatch):
    def open_gpu(*args, **how):
        raise ZeroDivisionError

    monkeypatch.setattr(opening, "CupyDevice", open_gpu)
    with pytest.raises(ZeroDivisionError):
        opening.open_device(0, GpuConfig())


def test_ranks_on_parts_of_a_divided_gpu_do_not_share_it(monkeypatch):
    parts = tuple(probe.Gpu("H100 MIG 3g.40gb", uuid, (9, 0), 40 << 30) for uuid in ("aa", "bb"))
    monkeypatch.setattr(probe, "driver", lambda: probe.Driver((13, 0), "580", parts))

    def open_gpu(index, *rest, **how):  # whose address on the bus is the same
        return CupyDevice(0, *rest, xp=FakeCupy(2, total=8 << 30), **how)

    monkeypatch.setattr(opening, "CupyDevice", open_gpu)

    def shared_by(uses):
        return on_all_ranks(2, lambda comm: sharing(comm, opening.open_device(uses[comm.rank], GpuConfig())))

    assert shared_by([0, 1]) == [1, 1] and shared_by([1, 1]) == [2, 2]
    monkeypatch.setattr(probe, "driver", lambda: None)
    assert shared_by([0, 1]) == [2, 2]


# A rank that fails while its stage is opened

BREAKING = """
import os, sys
sys.path.insert(0, {folder!r})
import hostgpu
from distgpt.gpu import stage as opening
from distgpt.core.base.errors import UsageError
from distgpt.gpu import probe

hostgpu.install()
how, rank = os.environ["BREAK"].split()

def fails(*args, **more):
    if os.environ["PMI_RANK"] == rank:
        raise UsageError("planted") if how == "missing" else RuntimeError("planted")
    return old(*args, **more)

if how == "missing":
    old, probe.require_gpu = probe.require_gpu, fails
else:
    old, opening.open_device = opening.open_device, fails
from distgpt.commands.cli import main
main()
"""


@pytest.fixture
def broken(tmp_path):
    if COMPILER is None:
        pytest.skip("needs g++ for the stand-in of a GPU")
    driver = tmp_path / "driver.py"

    def run(how, rank):
        driver.write_text(BREAKING.format(folder=str(Path(__file__).parent)))
        args = ("train", "--stage", "mpi-cuda", "--out", tmp_path / "run")
        env = {"BREAK": f"{how} {rank}"}
        return distgpt(*args, ranks=2, program=[sys.executable, str(driver)], cold=False, env=env)

    return run


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_lacks_its_gpu_or_fails_in_opening_it_ends_the_job(broken, rank):
    refused(broken("missing", rank), 2, f"rank {rank}: planted")
    result = broken("opening", rank)
    assert result.returncode == 70
    assert f"rank {rank}: internal error" in result.stderr and "planted" in result.stderr

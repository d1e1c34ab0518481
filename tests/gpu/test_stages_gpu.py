import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.job import this_job
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.gpu import probe, stage, transport
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.stage import GPU, GpuStage, bound
from distgpt.gpu.transport import DeviceComm, HostStaged, Nccl, choose_transport, sharing
from fakecupy import FakeCupy
from fakenccl import FakeNccl, NcclError
from hostgpu import install
from launching import SIZES
from threadranks import on_all_ranks

FLOAT = np.dtype(np.float32)
BY_HOST = GpuConfig(allreduce="host")


@pytest.fixture
def device():
    return CupyDevice(0, xp=FakeCupy())


class Twice(SerialComm):
    """One of two ranks; the other one has equal numbers."""

    size = local_size = 2

    def sum(self, array):
        array *= 2


@needs_the_processor
@pytest.mark.parametrize("gpus, indexes", [(4, [0]), (1, [0, 0]), (2, [0, 1, 0]), (3, [0, 1, 2, 0]), (8, [0, 1, 2, 3])])
def test_ranks_share_the_gpus_of_their_node(gpus, indexes):
    with install(gpus):
        stages = on_all_ranks(len(indexes), lambda comm: bound("mpi-cuda", comm, BY_HOST))
        for opened, index in zip(stages, indexes, strict=True):
            share, alone, notes = indexes.count(index), len(indexes) == 1, []
            opened.notes.report_to(notes.append)
            said = [f"GPU {index}: Fake GPU, 8 GiB", f"{share} ranks share this GPU", "gradients are summed with host"]
            assert notes == [text for text, is_said in zip(said, (True, share > 1, not alone), strict=True) if is_said]
            assert (opened.device.index, opened.device.sharing, opened.on_gpu) == (index, share, True)
            assert opened.free_memory() == (opened.device.memory()[0] // share, f"GPU {index} (Fake GPU)")
            assert type(opened.comm) is (SerialComm if alone else DeviceComm)
            assert (opened.comm.size, opened.transport) == (len(indexes), "" if alone else "host")


@needs_the_processor
def test_parts_of_a_divided_gpu_are_not_shared(monkeypatch):
    parts = tuple(probe.Gpu("H100 MIG 3g.40gb", uuid, (9, 0), 40 << 30) for uuid in ("aa", "bb"))

    def shared_by(uses):
        return on_all_ranks(2, lambda comm: sharing(comm, stage.open_device(uses[comm.rank], GpuConfig())))

    with install(2):
        sys.modules["cupy"].cuda.runtime.deviceGetPCIBusId = lambda device: "the same"
        monkeypatch.setattr(probe, "driver", lambda: probe.Driver((13, 0), "580", parts))
        assert shared_by([0, 1]) == [1, 1] and shared_by([1, 1]) == [2, 2]
        monkeypatch.setattr(probe, "driver", lambda: None)
        assert shared_by([0, 1]) == [2, 2]


def test_invalid_stage_options_are_rejected(device, monkeypatch):
    for launcher in SIZES:
        monkeypatch.delenv(launcher, raising=False)
    for name, option in (("serial", {"graphs": False}), ("mpi", {"allreduce": "nccl"}), ("serial", {"tf32": True})):
        with pytest.raises(UsageError, match="cuda or mpi-cuda"):
            open_stage(name, gpu=GpuConfig(**option))
    for launcher in SIZES:
        with monkeypatch.context() as launching:
            launching.setenv(launcher, "2")
            with pytest.raises(UsageError, match=r"launched as 2 processes.*--stage mpi-cuda"):
                open_stage("cuda")
    older = CupyDevice(0, xp=FakeCupy(capability=(7, 5)))
    for on, dtype, says in ((device, "float3", "float32"), (device, "int8", "int8"), (older, "bfloat16", "8.0.* 7.5")):
        with pytest.raises(UsageError, match=says):
            GpuStage("cuda", SerialComm(), 0, device=on).kernels(dtype)


class Taken(Exception):
    """Like CuPy's error for a GPU that is busy or out of memory."""


Taken.__module__ = "cupy_backends.cuda.api.runtime"


@needs_the_processor
@pytest.mark.parametrize("fails", ["CupyDevice", "LtMatmul"])
def test_unusable_gpu_is_reported_on_all_ranks(fails, monkeypatch):
    says, make = "cudaErrorDevicesUnavailable: all are busy", getattr(stage, fails)

    def fail(*args, **how):
        if args[0] == 1 or getattr(args[1], "index", 0) == 1:
            raise Taken(says)
        return make(*args, **how)

    with install(2):
        monkeypatch.setattr(stage, fails, fail)
        found = on_all_ranks(2, lambda comm: bound("mpi-cuda", comm, BY_HOST).kernels("float32"))
    assert all(isinstance(error, UsageError) and error.shared for error in found) and str(found[0]) == str(found[1])
    assert str(found[0]).startswith("rank 1: ") and f"GPU 1: {says}; " in str(found[0])


def test_other_errors_of_opening_propagate(monkeypatch):
    monkeypatch.setattr(stage, "CupyDevice", lambda *args, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage.open_device(0, GpuConfig())


def test_missing_gpu_is_reported_before_opening(monkeypatch):
    monkeypatch.setattr(probe, "driver", lambda: None)
    monkeypatch.setattr(stage, "open_device", None)
    found = on_all_ranks(2, lambda comm: GPU.open("mpi-cuda", comm, None, GpuConfig()))
    assert all(error.shared and "'mpi-cuda' cannot run here" in str(error) for error in found)


def test_sums_reuse_memory(device):
    array, way = device.zeros((25,), FLOAT), HostStaged(Twice(), device)
    device.upload(array, np.ones(25, FLOAT))
    for _ in range(20):
        way.sum(array[3:20])
    np.testing.assert_array_equal(device.download(array)[[0, 3, 19, 20]], [1, 2**20, 2**20, 1])
    assert device.xp.pinned < 5


def test_nccl_trouble_is_reported(device):
    nccl = FakeNccl()
    way = Nccl(Twice(), device, nccl)
    for trouble, says in ((None, ""), (NcclError("system error"), "system error"), (KeyError(6), "KeyError: 6")):
        nccl.trouble = trouble
        assert way.trouble() == says


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_error_is_one_line(size, capsys):
    """NCCL may notice before the next call that another rank is gone."""
    ended = []
    comm = SimpleNamespace(rank=1, size=size, abort=ended.append)
    assert this_job().leave(NcclError("remote process exited"), comm) == 70 and ended == [70] * (size > 1)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distgpt: rank 1: NCCL failed") and "remote process exited" in said


@pytest.mark.parametrize("available", [None, False, True])
def test_nccl_needs_its_library_and_binding(available, monkeypatch):
    monkeypatch.setattr(probe, "load_library", lambda names: None if available is None else object())
    nccl = FakeNccl()
    nccl.available = bool(available)
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules["cupy.cuda"].nccl = nccl
    assert transport.nccl_module() is (nccl if available else None)


@pytest.mark.parametrize("how", ["auto", "nccl", "host"])
@pytest.mark.parametrize("crowded", [(), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("lacking", [(), (2,), (0, 1, 2)], ids=str)
def test_ranks_agree_on_a_transport(how, crowded, lacking, monkeypatch):
    """`crowded`: ranks that share a GPU; `lacking`: ranks without NCCL."""
    here = threading.local()
    monkeypatch.setattr(transport, "nccl_module", lambda: here.nccl)

    def act(comm):
        here.nccl = None if comm.rank in lacking else FakeNccl()
        device = CupyDevice(0, xp=FakeCupy())
        device.place = f"GPU {0 if comm.rank in crowded else comm.rank}"
        device.sharing = sharing(comm, device)
        return choose_transport(how, comm, device)

    found = on_all_ranks(3, act)
    if how == "nccl" and (crowded or lacking):
        says = "a GPU per rank" if crowded else "pip install nvidia-nccl-cu13"
        assert all(error.shared and says in str(error) for error in found)
    else:
        by_nccl = how == "nccl" or (how == "auto" and not crowded and not lacking)
        assert [each.name for each in found] == ["nccl" if by_nccl else "host"] * 3


@pytest.mark.parametrize(("version", "variable"), [(22809, "NCCL_HOSTID"), (23007, "NCCL_MULTI_RANK_GPU_ENABLE")])
def test_shared_gpu_configures_nccl_before_its_first_call(version, variable, device, monkeypatch):
    seen, nccl = {}, FakeNccl(version=version)
    identity = nccl.identity
    nccl.get_unique_id = lambda: seen.update(os.environ) or identity  # NCCL reads the environment here
    monkeypatch.setattr(transport, "nccl_module", lambda: nccl)
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_MAX_CTAS": "2", transport.SHARED_GPU: "1"})
    assert choose_transport("auto", Twice(), device).name == "nccl"
    assert variable not in seen, "ranks with a GPU each need nothing"
    device.sharing = 2
    assert choose_transport("nccl", Twice(), device).name == "nccl"
    assert seen[variable] and seen["NCCL_MAX_CTAS"] == "2", "what a user has set stays"

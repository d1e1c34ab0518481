"""The ways that arrays on GPUs take between ranks, alone and under a real mpirun."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.job import this_job
from distgpt.gpu import transport
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.transport import HostStaged, Nccl
from fakecupy import FakeCupy
from fakenccl import FakeNccl, NcclError

from conftest import distgpt, needs_mpi

FLOAT = np.dtype(np.float32)


class Twice(SerialComm):
    """One of two ranks: the other has the same numbers to sum."""

    size = local_size = 2

    def sum(self, array):
        array *= 2


@pytest.fixture
def device():
    return CupyDevice(0, xp=FakeCupy())


def filled(device, numbers):
    array = device.zeros(numbers.shape, numbers.dtype)
    device.upload(array, numbers)
    return array


# Through the host


def test_sums_take_the_same_memory_again_and_again(device):
    array, way = filled(device, np.ones(25, FLOAT)), HostStaged(Twice(), device)
    for _ in range(20):
        way.sum(array[3:20])
    np.testing.assert_array_equal(device.download(array)[[0, 3, 19, 20]], [1, 2**20, 2**20, 1])
    assert len({id(block) for block in device.xp.free_pinned[512]}) + len(device._under_way) < 5


# NCCL


def test_what_has_failed_in_nccl_is_asked_for(device):
    nccl = FakeNccl()
    way = Nccl(Twice(), device, nccl)
    assert way.trouble() == ""
    nccl.trouble = "unhandled system error"
    assert way.trouble() == "unhandled system error"
    way._ranks.check_async_error = lambda: {}[6]
    assert way.trouble() == "KeyError: 6"


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_nccls_in_the_main_thread_is_one_line(size, capsys):
    """As where it has noticed that another rank is gone before the next call."""
    ended = []
    comm = SimpleNamespace(rank=1, size=size, abort=ended.append)
    assert this_job().leave(NcclError("remote process exited"), comm) == 70 and ended == [70] * (size > 1)
    (said,) = capsys.readouterr().err.splitlines()
    known = "distgpt: rank 1: NCCL has failed, as it does when another rank or host dies: "
    assert said.startswith(f"{known}remote process exited; with NCCL_DEBUG=INFO")


# Choosing


def test_nccl_is_there_only_with_its_library_and_a_binding_that_finds_it(monkeypatch):
    monkeypatch.setattr(transport.probe, "load_library", lambda names: None)
    assert transport.nccl_module() is None
    monkeypatch.setattr(transport.probe, "load_library", lambda names: object())
    for available in (False, True):
        nccl = FakeNccl()
        nccl.available = available
        monkeypatch.setitem(sys.modules, "cupy", type(sys)("cupy"))
        cuda = type(sys)("cupy.cuda")
        cuda.nccl = nccl
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        assert transport.nccl_module() is (nccl if available else None)


def test_ranks_that_each_see_a_gpu_of_their_own_are_not_crowded(device, monkeypatch):
    """As launchers arrange it with CUDA_VISIBLE_DEVICES: every rank counts one GPU."""
    monkeypatch.setattr(transport, "nccl_module", FakeNccl)
    comm = Twice()
    for places, name in ((("own", "other"), "nccl"), (("own", "own"), "host")):
        monkeypatch.setattr(
            transport, "gather_bytes", lambda comm, data, places=places: [data if p == "own" else b"" for p in places]
        )
        device.sharing = transport.sharing(comm, device)
        assert transport.choose_transport("auto", comm, device).name == name


@pytest.mark.parametrize(("version", "variable"), [(22809, "NCCL_HOSTID"), (23007, "NCCL_MULTI_RANK_GPU_ENABLE")])
def test_nccl_between_ranks_on_one_gpu_is_asked_for_and_told_so_before_its_first_call(
    version, variable, device, monkeypatch
):
    seen = {}

    class Watching(FakeNccl):
        def get_unique_id(self):  # where NCCL reads the environment
            seen.update(os.environ)
            return super().get_unique_id()

    monkeypatch.setattr(transport, "nccl_module", lambda: Watching(version=version))
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"NCCL_MAX_CTAS": "2"})
    device.sharing = 2
    assert transport.choose_transport("auto", Twice(), device).name == "host"
    with pytest.raises(UsageError, match="a GPU for every rank"):
        transport.choose_transport("nccl", Twice(), device)
    os.environ[transport.SHARED_GPU] = "1"
    device.sharing = 1
    assert transport.choose_transport("auto", Twice(), device).name == "nccl"
    assert variable not in seen, "ranks with a GPU each need nothing"
    device.sharing = 2
    assert transport.choose_transport("nccl", Twice(), device).name == "nccl"
    assert seen[variable] and seen["NCCL_MAX_CTAS"] == "2", "what a user has set stays"


DRIVER = """
import json, sys
import numpy as np
from fakecupy import FakeCupy
from fakenccl import FakeNccl
from mpi4py import MPI
from distgpt.core.comm import mpi
from distgpt.gpu import transport
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.base.errors import UsageError
from distgpt.gpu.device import CupyDevice
from distgpt.core.ops.low_precision import to_bfloat16


def sums(comm, device):
    for dtype in ("float32", "float64"):
        array = device.zeros((7, 11), np.dtype(dtype))
        device.upload(array, np.arange(77, dtype=dtype) * (comm.rank + 1))
        way = transport.HostStaged(comm, device)
        way.sum(array)
        way.sum(array)
        expected = np.arange(77).reshape(7, 11) * comm.size * comm.size * (comm.size + 1) / 2
        np.testing.assert_array_equal(device.download(array), expected)
    bits = to_bfloat16(np.linspace(-3, 3, 101))
    array = device.zeros((101,), np.dtype(np.uint16))
    device.upload(array, bits if comm.rank == 0 else np.zeros_like(bits))
    transport.HostStaged(comm, device).broadcast(array)
    np.testing.assert_array_equal(device.download(array), bits)


def verdict(how, comm, device):
    try:
        device.sharing = transport.sharing(comm, device)
        return transport.choose_transport(how, comm, device).name
    except UsageError as error:
        assert error.shared
        return str(error)


def choices(comm, device):
    last = comm.size - 1
    for how in ("auto", "nccl", "host"):
        for crowded in ("nobody", "two", "all"):
            for lacking in ("nobody", "last", "all"):
                alone = crowded == "nobody" or (crowded == "two" and 0 < comm.rank < last)
                device.place = f"GPU {comm.rank if alone else 0}"
                missing = lacking == "all" or (lacking == "last" and comm.rank == last)
                transport.nccl_module = lambda: None if missing else FakeNccl()
                verdicts = gather_bytes(comm, verdict(how, comm, device).encode())
                yield how, crowded, lacking, sorted({each.decode() for each in verdicts})


try:
    comm = mpi.MpiComm()
    transport.PIECE_BYTES = 100
    device = CupyDevice(0, xp=FakeCupy())
    sums(comm, device)
    found = list(choices(comm, device))
    if comm.rank == 0:
        print(json.dumps(found))
except BaseException:
    import traceback
    traceback.print_exc()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
"""


def expected(how, crowded, lacking):
    """A word of the verdict that all ranks should arrive at."""
    if how == "nccl" and crowded != "nobody":
        return "a GPU for every rank"
    if how == "nccl" and lacking != "nobody":
        return "pip install nvidia-nccl-cu13"
    return "nccl" if how == "nccl" or (how, crowded, lacking) == ("auto", "nobody", "nobody") else "host"


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_ranks_sum_share_and_choose_together(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    result = distgpt(ranks=3, program=[sys.executable, str(driver)], cold=False, env=path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 3 * 3 * 3
    for how, crowded, lacking, verdicts in found:
        (verdict,) = verdicts
        word = expected(how, crowded, lacking)
        assert verdict == word if word in ("nccl", "host") else word in verdict, (how, crowded, lacking)

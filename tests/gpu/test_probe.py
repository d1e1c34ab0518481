"""What a GPU stage lacks, on machines that lack one thing each; and where libraries are found."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.gpu import probe as probing
from distgpt.gpu.probe import Driver, Found, Gpu, driver, missing_for_gpu, probe, require_gpu
from hostbuild import COMPILER

H200 = Gpu("NVIDIA H200", "01" * 16, (9, 0), 150_000_000_000)
T4 = Gpu("Tesla T4", "02" * 16, (7, 5), 16_000_000_000)
V100 = Gpu("Tesla V100", "03" * 16, (7, 0), 32_000_000_000)
P100 = Gpu("Tesla P100", "04" * 16, (6, 0), 16_000_000_000)


class FakeCuda:
    """libcuda as ctypes shows it: pointers in, error numbers out."""

    def __init__(self, gpus=(), version=13000, error=0):
        self.gpus, self.version, self.error = gpus, version, error

    def cuInit(self, flags):
        return self.error

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal + 40  # a handle, which is not the number

    def cuDeviceGetName(self, name, size, device):
        name.value = self._of(device).name.encode()[: size - 1]

    def cuDeviceGetUuid(self, uuid, device):
        uuid.raw = bytes.fromhex(self._of(device).uuid)

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = self._of(device).memory

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self._of(device).capability[{75: 0, 76: 1}[attribute]]

    def cuGetErrorString(self, error, text):
        text._obj.value = {802: b"system not yet initialized"}.get(error)

    def _of(self, device):
        return self.gpus[device.value - 40]


class NewerCuda(FakeCuda):
    """It also knows the parts that a GPU can be divided into."""

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid.raw = bytes.fromhex(self._of(device).uuid)[::-1]


@pytest.fixture
def has(monkeypatch):
    """Lets this machine have a driver, or None, and packages of these versions."""

    def set_up(cuda, installed=None, release=Path("/nowhere")):
        known = installed or {}

        def version(name):
            if name not in known:
                raise importlib.metadata.PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(probing, "_load", lambda name, mode: cuda)
        monkeypatch.setattr(probing, "_MODULE", release)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_up


# The driver


def test_the_driver_and_its_devices_are_described_as_it_tells_them(tmp_path, has):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release\nGCC 12")
    has(None)
    assert driver() is None
    both, reverse = (H200, T4), replace(H200, uuid="00" * 15 + "07")
    failed = partial(Driver, (13, 0), "580.65.06", ())
    for cuda, expected in (
        (FakeCuda(both), Driver((13, 0), "580.65.06", both)),
        (FakeCuda(version=12090), Driver((12, 9), "580.65.06")),
        (NewerCuda((reverse,)), Driver((13, 0), "580.65.06", (replace(H200, uuid="07" + "00" * 15),))),
        (FakeCuda(both, error=100), Driver((13, 0), "580.65.06")),
        (FakeCuda(error=802), failed("system not yet initialized (CUDA error 802)")),
        (FakeCuda(error=999), failed("unknown error (CUDA error 999)")),
    ):
        has(cuda, release=version)
        assert driver() == expected
    has(FakeCuda())
    assert driver().release == ""


# Packages and libraries


def test_libraries_are_looked_for_in_the_cuda_that_cupy_is_built_for(has, monkeypatch):
    asked = []

    def find(names):
        asked.append(list(names))
        return "/a/file" if "libnccl.so.2" in names else None

    monkeypatch.setattr(probing, "located", find)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for installed, cuda, wanted in (
        ({"cupy-cuda12x": "14.0"}, 13000, ["libnvrtc.so.12"]),
        ({"cupy-cuda13x": "14.0"}, 13000, ["libnvrtc.so.13"]),
        ({}, 12040, ["libnvrtc.so.12"]),
        ({"cupy": "14.0"}, 13010, ["libnvrtc.so.13"]),
        ({}, None, ["libnvrtc.so.13", "libnvrtc.so.12"]),
    ):
        asked.clear()
        has(cuda and FakeCuda((H200,), cuda), installed)
        found = probe()
        assert wanted in asked and ["libcudnn.so.9"] in asked, (installed, cuda)
        assert found.libraries == {"NCCL": "/a/file"} and found.visible == "1"


# What is missing

GOOD = Found(
    driver=Driver((13, 0), "580.65.06", (H200,)),
    packages={"cupy-cuda13x": "14.2.0", "nvidia-cudnn-frontend": "1.32.0"},
    libraries={"NVRTC": "/n", "cuBLASLt": "/b", "cuDNN": "/d", "NCCL": "/c"},
    visible=None,
)


def with_driver(cuda=(13, 0), gpus=(H200,), problem=""):
    return {"driver": Driver(cuda, "", gpus, problem)}


def without_library(name):
    return {"libraries": {key: file for key, file in GOOD.libraries.items() if key != name}}


CUDA12 = {"packages": {"cupy-cuda12x": "13.3.0"}}


def test_nothing_is_missing_where_all_is_there(monkeypatch):
    monkeypatch.setattr(probing, "probe", lambda: GOOD)
    assert missing_for_gpu(GOOD) == missing_for_gpu(GOOD, "bfloat16") == []
    require_gpu("cuda", "bfloat16")


REMOVE = "pip uninstall -y"
INSTALL_12, INSTALL_13 = "pip install 'distgpt[cuda12x]'", "pip install 'distgpt[cuda13x]'"
NO_CUPY: dict[str, Any] = {"packages": {}}
TWO_CUPYS = {"packages": {"cupy-cuda12x": "13.3.0", "cupy-cuda13x": "14.2.0"}}
TROUBLES = [
    ({"driver": None}, "no NVIDIA driver was found (libcuda.so.1)", "ask for a GPU node"),
    (with_driver(gpus=()), "shows no GPU", "--gpus-per-node"),
    ({**with_driver(gpus=()), "visible": "7"}, "shows no GPU with CUDA_VISIBLE_DEVICES='7'", "nvidia-smi"),
    (with_driver(gpus=(), problem="system not ready"), "system not ready", "administrator"),
    (NO_CUPY, "CuPy is not installed", INSTALL_13),
    ({**NO_CUPY, **with_driver((12, 4))}, "CuPy is not installed", INSTALL_12),
    (
        with_driver((12, 4)),
        "one CuPy for CUDA 12 is needed, not cupy-cuda13x",
        f"{REMOVE} cupy-cuda13x && {INSTALL_12}",
    ),
    (
        TWO_CUPYS,
        "one CuPy for CUDA 13 is needed, not cupy-cuda12x, cupy-cuda13x",
        f"{REMOVE} cupy-cuda12x cupy-cuda13x && {INSTALL_13}",
    ),
    ({"packages": {"cupy-cuda11x": "12.0.0"}}, "not cupy-cuda11x", INSTALL_13),
    ({**with_driver((11, 4)), **CUDA12}, "runs CUDA 11.4 at most", "install a newer driver"),
    (without_library("NVRTC"), "NVRTC", "pip install nvidia-cuda-nvrtc"),
    (without_library("cuBLASLt"), "cuBLASLt", "pip install nvidia-cublas"),
    ({**without_library("cuBLASLt"), **CUDA12}, "cuBLASLt", "pip install nvidia-cublas-cu12"),
    (
        with_driver(gpus=(H200, V100)),  # which CUDA 13 no longer compiles for
        "one CuPy for CUDA 12 is needed, not cupy-cuda13x",
        f"{REMOVE} cupy-cuda13x && {INSTALL_12}",
    ),
    ({**with_driver(gpus=(P100,)), **CUDA12}, "GPU 0 (Tesla P100)", "7.0 is needed"),
]


def test_each_thing_that_is_missing_has_its_remedy(monkeypatch):
    low = (with_driver(gpus=(T4,)), "capability 7.5", "bfloat16 needs 8.0; use --dtype float32")
    for dtype, cases in (("float32", TROUBLES), ("bfloat16", [low])):
        for change, what, remedy in cases:
            found = replace(GOOD, **change)
            (missing,) = missing_for_gpu(found, dtype)
            assert what in missing.what, (change, missing)
            assert remedy in missing.remedy, (change, missing)
            monkeypatch.setattr(probing, "probe", lambda found=found: found)
            with pytest.raises(UsageError) as refused:
                require_gpu("mpi-cuda", dtype)
            said = f"stage 'mpi-cuda' cannot run here: {missing.what}: {missing.remedy}"
            assert str(refused.value) == said


def test_older_gpus_and_older_cuda_are_good_enough_where_they_fit():
    for change, dtype in (
        (with_driver(gpus=(T4,)), "float32"),
        ({**with_driver(gpus=(V100,)), **CUDA12}, "float32"),
        ({**with_driver((12, 4)), **CUDA12}, "bfloat16"),
        (CUDA12, "bfloat16"),
        ({"packages": {"cupy": "14.2.0"}}, "bfloat16"),
    ):
        assert missing_for_gpu(replace(GOOD, **change), dtype) == [], change


@pytest.mark.ci
def test_probing_loads_nothing_heavy():
    script = "import sys; from distgpt.gpu.probe import *; missing_for_gpu(probe()); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(result.stdout.split()) & {"cupy", "numpy", "numba", "mpi4py"}


@pytest.mark.ci
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_libraries_come_from_wheels_then_the_toolkit_and_never_twice(tmp_path):
    places = {"wheel": "site/nvidia/cu13/lib", "toolkit": "cuda/lib64", "elsewhere": "elsewhere"}
    for number, folder in enumerate(places.values()):
        place = tmp_path / folder
        place.mkdir(parents=True)
        code = f'extern "C" int which() {{ return {number}; }}'
        flags = ["-shared", "-fPIC", "-Wl,-soname,libprobe.so.1", "-x", "c++", "-"]
        subprocess.run([COMPILER, *flags, "-o", place / "libprobe.so.1"], input=code, text=True, check=True)

    def which(before="", **environment):
        code = f"import ctypes; {before}\nfrom distgpt.gpu.probe import load_library, library_path\n"
        code += "names = ('libprobe.so.2', 'libprobe.so.1')\nlibrary = load_library(names)\n"
        code += "print(library.which() if library else None, library_path(names))"
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([environment.pop("site", ""), str(root)])
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    wheel, toolkit, elsewhere = (str(tmp_path / folder / "libprobe.so.1") for folder in places.values())
    site, cuda = str(tmp_path / "site"), str(tmp_path / "cuda")
    assert which(CUDA_HOME=cuda, site=site) == ["0", wheel]
    assert which(CUDA_HOME=cuda) == ["1", toolkit]
    anywhere = str(Path(elsewhere).parent)
    assert which(LD_LIBRARY_PATH=anywhere, CUDA_HOME=cuda, site=site) == ["0", wheel]
    loaded = f"ctypes.CDLL({elsewhere!r})"
    assert which(loaded, CUDA_HOME=cuda, site=site) == ["2", wheel]

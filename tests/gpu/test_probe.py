import ctypes
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.gpu import probe as probing
from distgpt.gpu.probe import Driver, Found, Gpu, driver, missing_for_gpu, probe, require_gpu
from hostbuild import COMPILER

H200 = Gpu("NVIDIA H200", "01" * 16, (9, 0), 150_000_000_000)
T4 = Gpu("Tesla T4", "02" * 16, (7, 5), 16_000_000_000)
V100 = Gpu("Tesla V100", "03" * 16, (7, 0), 32_000_000_000)
P100 = Gpu("Tesla P100", "04" * 16, (6, 0), 16_000_000_000)


def put(where, value, kind=ctypes.c_int):
    ctypes.cast(where, ctypes.POINTER(kind))[0] = value


class FakeCuda:
    """libcuda as ctypes loads it."""

    def __init__(self, gpus=(), version=13000, error=0):
        of = self._of = lambda device: gpus[device.value - 40]  # handles differ from numbers
        text = {802: b"system not yet initialized"}
        self.cuInit = lambda flags: error
        self.cuDriverGetVersion = lambda where: put(where, version)
        self.cuDeviceGetCount = lambda where: put(where, len(gpus))
        self.cuDeviceGet = lambda where, ordinal: put(where, ordinal + 40)
        self.cuDeviceGetName = lambda name, size, device: setattr(name, "value", of(device).name.encode()[: size - 1])
        self.cuDeviceGetUuid = lambda uuid, device: setattr(uuid, "raw", bytes.fromhex(of(device).uuid))
        self.cuDeviceTotalMem_v2 = lambda where, device: put(where, of(device).memory, ctypes.c_size_t)
        self.cuDeviceGetAttribute = lambda where, which, device: put(where, of(device).capability[which - 75])
        self.cuGetErrorString = lambda number, where: put(where, text.get(number), ctypes.c_char_p)


class NewerCuda(FakeCuda):
    """A version that supports MIG."""

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid.raw = bytes.fromhex(self._of(device).uuid)[::-1]


@pytest.fixture
def has(monkeypatch):
    """Return a function that fakes the driver and the installed packages."""

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


BOTH, REVERSED = (H200, T4), replace(H200, uuid="00" * 15 + "07")
KNOWN = partial(Driver, (13, 0), "580.65.06")


@pytest.mark.parametrize(("cuda", "expected"), [
    (FakeCuda(BOTH), KNOWN(BOTH)), (FakeCuda(version=12090), Driver((12, 9), "580.65.06")),
    (NewerCuda((REVERSED,)), KNOWN((replace(H200, uuid="07" + "00" * 15),))), (FakeCuda(BOTH, error=100), KNOWN()),
    (FakeCuda(error=802), KNOWN((), "system not yet initialized (CUDA error 802)")),
    (FakeCuda(error=999), KNOWN((), "unknown error (CUDA error 999)")), (None, None),
])  # fmt: skip
def test_driver_and_devices_are_described(cuda, expected, tmp_path, has):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release\nGCC 12")
    has(cuda, release=version)
    assert driver() == expected
    has(cuda)
    assert driver() == (expected and replace(expected, release=""))


@pytest.mark.parametrize(("installed", "cuda", "wanted"), [
    ({"cupy-cuda12x": "14.0"}, 13000, ["libnvrtc.so.12"]), ({"cupy-cuda13x": "14.0"}, 13000, ["libnvrtc.so.13"]),
    ({}, 12040, ["libnvrtc.so.12"]), ({"cupy": "14.0"}, 13010, ["libnvrtc.so.13"]),
    ({}, None, ["libnvrtc.so.13", "libnvrtc.so.12"]),
])  # fmt: skip
def test_libraries_match_the_cuda_of_cupy(installed, cuda, wanted, has, monkeypatch):
    asked = []

    def find(names):
        asked.append(list(names))
        return "/a/file" if "libnccl.so.2" in names else None

    monkeypatch.setattr(probing, "located", find)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    has(cuda and FakeCuda((H200,), cuda), installed)
    found = probe()
    assert wanted in asked and ["libcudnn.so.9"] in asked
    assert found.libraries == {"NCCL": "/a/file"} and found.visible == "1"


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
REMOVE = "pip uninstall -y"
INSTALL_12, INSTALL_13 = "pip install 'distgpt[cuda12x]'", "pip install 'distgpt[cuda13x]'"
NO_CUPY = {"packages": {}}
TWO_CUPYS = {"packages": {"cupy-cuda12x": "13.3.0", "cupy-cuda13x": "14.2.0"}}
ONE_CUPY = "CuPy for CUDA 12 is required, not cupy-cuda13x"
SWITCH = f"{REMOVE} cupy-cuda13x && {INSTALL_12}"
TROUBLES = [
    ({"driver": None}, "no NVIDIA driver found (libcuda.so.1)", "request a GPU node"),
    (with_driver(gpus=()), "shows no GPU", "--gpus-per-node"),
    ({**with_driver(gpus=()), "visible": "7"}, "shows no GPU with CUDA_VISIBLE_DEVICES='7'", "nvidia-smi"),
    (with_driver(gpus=(), problem="system not ready"), "system not ready", "administrator"),
    (NO_CUPY, "CuPy is not installed", INSTALL_13),
    ({**NO_CUPY, **with_driver((12, 4))}, "CuPy is not installed", INSTALL_12),
    (with_driver((12, 4)), ONE_CUPY, SWITCH),
    (TWO_CUPYS, "not cupy-cuda12x, cupy-cuda13x", f"{' '.join(TWO_CUPYS['packages'])} && {INSTALL_13}"),
    ({"packages": {"cupy-cuda11x": "12.0.0"}}, "not cupy-cuda11x", INSTALL_13),
    ({**with_driver((11, 4)), **CUDA12}, "supports only CUDA 11.4", "install a driver for CUDA"),
    (without_library("NVRTC"), "NVRTC", "pip install nvidia-cuda-nvrtc"),
    (without_library("cuBLASLt"), "cuBLASLt", "pip install nvidia-cublas"),
    ({**without_library("cuBLASLt"), **CUDA12}, "cuBLASLt", "pip install nvidia-cublas-cu12"),
    (with_driver(gpus=(H200, V100)), ONE_CUPY, SWITCH),  # not supported by CUDA 13
    ({**with_driver(gpus=(P100,)), **CUDA12}, "GPU 0 (Tesla P100)", "7.0 is required"),
]
LOW = (with_driver(gpus=(T4,)), "capability 7.5", "bfloat16 requires 8.0; use --dtype float32")


@pytest.mark.parametrize(
    ("change", "what", "remedy", "dtype"), [*((*each, "float32") for each in TROUBLES), (*LOW, "bfloat16")]
)
def test_missing_parts_have_remedies(change, what, remedy, dtype, monkeypatch):
    found = replace(GOOD, **change)
    (missing,) = missing_for_gpu(found, dtype)
    assert what in missing.what and remedy in missing.remedy
    monkeypatch.setattr(probing, "probe", lambda: found)
    with pytest.raises(UsageError) as refused:
        require_gpu("mpi-cuda", dtype)
    assert str(refused.value) == f"stage 'mpi-cuda' cannot run here: {missing.what}: {missing.remedy}"


@pytest.mark.parametrize(("change", "dtype"), [
    *(({}, "float32"), ({}, "bfloat16"), (CUDA12, "bfloat16"), ({"packages": {"cupy": "14.2.0"}}, "bfloat16")),
    *((with_driver(gpus=(T4,)), "float32"), ({**with_driver(gpus=(V100,)), **CUDA12}, "float32")),
    ({**with_driver((12, 4)), **CUDA12}, "bfloat16"),
])  # fmt: skip
def test_older_gpus_and_cuda_are_supported(change, dtype, monkeypatch):
    found = replace(GOOD, **change)
    assert missing_for_gpu(found, dtype) == []
    monkeypatch.setattr(probing, "probe", lambda: found)
    require_gpu("cuda", dtype)


@pytest.mark.ci
def test_probing_loads_nothing_heavy():
    script = "import sys; from distgpt.gpu.probe import *; missing_for_gpu(probe()); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert not set(loaded) & {"cupy", "numpy", "numba", "mpi4py"}


@pytest.mark.ci
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_libraries_come_from_wheels_then_the_toolkit(tmp_path):
    places = {"wheel": "site/nvidia/cu13/lib", "toolkit": "cuda/lib64", "elsewhere": "elsewhere"}
    for number, folder in enumerate(places.values()):
        place = tmp_path / folder
        place.mkdir(parents=True)
        code = f'extern "C" int which() {{ return {number}; }}'
        flags = ["-shared", "-fPIC", "-Wl,-soname,libprobe.so.1", "-x", "c++", "-"]
        subprocess.run([COMPILER, *flags, "-o", place / "libprobe.so.1"], input=code, text=True, check=True)

    def which(before="", site="", **environment):
        code = f"import ctypes; {before}\nfrom distgpt.gpu.probe import load_library, library_path\n"
        code += "names = ('libprobe.so.2', 'libprobe.so.1')\nlibrary = load_library(names)\n"
        code += "print(library.which() if library else None, library_path(names))"
        own = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        own["PYTHONPATH"] = os.pathsep.join([site, str(Path(__file__).parents[2])])
        return subprocess.check_output([sys.executable, "-c", code], env={**own, **environment}, text=True).split()

    wheel, toolkit, elsewhere = (str(tmp_path / folder / "libprobe.so.1") for folder in places.values())
    site, cuda = str(tmp_path / "site"), str(tmp_path / "cuda")
    assert which(CUDA_HOME=cuda, site=site) == ["0", wheel] and which(CUDA_HOME=cuda) == ["1", toolkit]
    assert which(LD_LIBRARY_PATH=str(Path(elsewhere).parent), CUDA_HOME=cuda, site=site) == ["0", wheel]
    assert which(f"ctypes.CDLL({elsewhere!r})", CUDA_HOME=cuda, site=site) == ["2", wheel]

"""What keeps the GPU stages from running, told for machines that lack one thing each."""

import importlib.metadata
import subprocess
import sys
from dataclasses import replace

import pytest

from distgpt.errors import UsageError
from distgpt.gpu.probe import (
    Driver,
    Found,
    Gpu,
    Missing,
    driver,
    located,
    missing_for_gpu,
    packages,
    probe,
    require_gpu,
    useful_for_gpu,
)

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
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal + 40  # a handle, which is not the number
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = self._of(device).name.encode()[: size - 1]
        return 0

    def cuDeviceGetUuid(self, uuid, device):
        uuid.raw = bytes.fromhex(self._of(device).uuid)
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = self._of(device).memory
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self._of(device).capability[{75: 0, 76: 1}[attribute]]
        return 0

    def cuGetErrorString(self, error, text):
        text._obj.value = {802: b"system not yet initialized"}.get(error)
        return 0 if error == 802 else 1

    def _of(self, device):
        return self.gpus[device.value - 40]


class NewerCuda(FakeCuda):
    """It also knows the parts that a GPU can be divided into."""

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid.raw = bytes.fromhex(self._of(device).uuid)[::-1]
        return 0


def absent(name):
    raise OSError(f"{name}: cannot open shared object file")


def versions(**installed):
    known = {name.replace("_", "-"): version for name, version in installed.items()}

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    return version


# The driver


def test_a_machine_without_a_driver_has_none():
    assert driver(absent) is None


def test_devices_are_described_as_the_driver_tells_them(tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release\nGCC 12"
    )
    found = driver(lambda name: FakeCuda((H200, T4)), tmp_path / "version")
    assert found == Driver((13, 0), "580.65.06", (H200, T4))


def test_parts_of_a_gpu_are_told_apart_where_the_driver_can(tmp_path):
    mig = replace(H200, uuid="00" * 15 + "07")
    (found,) = driver(lambda name: NewerCuda((mig,)), tmp_path / "none").gpus
    assert found.uuid == "07" + "00" * 15


def test_versions_of_cuda_have_a_minor_part(tmp_path):
    assert driver(lambda name: FakeCuda(version=12090), tmp_path / "none").cuda == (12, 9)


@pytest.mark.parametrize(
    "error, problem",
    [
        (100, ""),
        (802, "system not yet initialized (CUDA error 802)"),
        (999, "unknown error (CUDA error 999)"),
    ],
)
def test_a_driver_that_does_not_start_says_why(tmp_path, error, problem):
    found = driver(lambda name: FakeCuda((H200,), error=error), tmp_path / "none")
    assert found == Driver((13, 0), "", (), problem)


# Packages and libraries


def test_only_packages_that_are_installed_are_found():
    version = versions(cupy_cuda13x="14.2.0", nvidia_cudnn_frontend="1.32.0", numpy="2.4")
    assert packages(version) == {"cupy-cuda13x": "14.2.0", "nvidia-cudnn-frontend": "1.32.0"}


@pytest.mark.parametrize(
    "installed, cuda, wanted",
    [
        ({"cupy_cuda12x": "14.0"}, 13000, ["libnvrtc.so.12"]),
        ({"cupy_cuda13x": "14.0"}, 13000, ["libnvrtc.so.13"]),
        ({}, 12040, ["libnvrtc.so.12"]),
        ({"cupy": "14.0"}, 13010, ["libnvrtc.so.13"]),
        ({}, None, ["libnvrtc.so.13", "libnvrtc.so.12"]),
    ],
)
def test_libraries_are_looked_for_in_the_cuda_that_cupy_is_built_for(installed, cuda, wanted):
    asked = []

    def find(names):
        asked.append(list(names))
        return "/a/file" if "libnccl.so.2" in names else None

    load = absent if cuda is None else lambda name: FakeCuda((H200,), cuda)
    found = probe(load, versions(**installed), find, {"CUDA_VISIBLE_DEVICES": "1"})
    assert wanted in asked and ["libcudnn.so.9"] in asked
    assert found.libraries == {"NCCL": "/a/file"} and found.visible == "1"


def test_a_library_of_the_system_is_located_and_one_that_is_nowhere_is_not():
    assert located(["libc.so.6"]) == "libc.so.6"
    assert located(["libdistgpt-has-none.so.1"]) is None


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


def test_nothing_is_missing_where_all_is_there():
    assert missing_for_gpu(GOOD) == missing_for_gpu(GOOD, "bfloat16") == useful_for_gpu(GOOD, True) == []
    require_gpu("cuda", "bfloat16", GOOD)


@pytest.mark.parametrize(
    "change, dtype, what, remedy",
    [
        ({"driver": None}, "float32", "no NVIDIA driver was found (libcuda.so.1)", "ask for a GPU node"),
        (with_driver(gpus=()), "float32", "shows no GPU", "--gpus-per-node"),
        (
            {**with_driver(gpus=()), "visible": ""},
            "float32",
            "CUDA_VISIBLE_DEVICES='' hides all GPUs",
            "unset it",
        ),
        ({**with_driver(gpus=()), "visible": "7"}, "float32", "CUDA_VISIBLE_DEVICES='7'", "nvidia-smi"),
        (with_driver(gpus=(), problem="system not ready"), "float32", "system not ready", "administrator"),
        ({"packages": {}}, "float32", "CuPy is not installed", "pip install 'distgpt[cuda13x]'"),
        (
            {"packages": {}, **with_driver((12, 4))},
            "float32",
            "CuPy is not installed",
            "pip install 'distgpt[cuda12x]'",
        ),
        (
            {"packages": {}, **with_driver(gpus=(V100,))},
            "float32",
            "CuPy is not installed",
            "pip install 'distgpt[cuda12x]'",
        ),
        (
            with_driver((12, 4)),
            "float32",
            "cupy-cuda13x needs CUDA 13, but the driver runs 12.4 at most",
            "pip uninstall -y cupy-cuda13x && pip install 'distgpt[cuda12x]'",
        ),
        (
            {"packages": {"cupy-cuda12x": "13.3.0", "cupy-cuda13x": "14.2.0"}},
            "float32",
            "2 CuPy packages are installed at once (cupy-cuda12x, cupy-cuda13x)",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'distgpt[cuda13x]'",
        ),
        (
            {"packages": {"cupy-cuda11x": "13.3.0"}},
            "float32",
            "cupy-cuda11x is built for CUDA 11, too old",
            "pip uninstall -y cupy-cuda11x && pip install 'distgpt[cuda13x]'",
        ),
        ({**with_driver((11, 4)), **CUDA12}, "float32", "runs CUDA 11.4 at most", "install a newer driver"),
        (without_library("NVRTC"), "float32", "NVRTC", "pip install nvidia-cuda-nvrtc"),
        ({**without_library("NVRTC"), **CUDA12}, "float32", "NVRTC", "pip install nvidia-cuda-nvrtc-cu12"),
        (without_library("cuBLASLt"), "float32", "cuBLASLt", "pip install nvidia-cublas"),
        ({**without_library("cuBLASLt"), **CUDA12}, "float32", "cuBLASLt", "pip install nvidia-cublas-cu12"),
        (
            with_driver(gpus=(H200, V100)),
            "float32",
            "GPU 1 (Tesla V100) has compute capability 7.0",
            "CUDA 13 needs 7.5, CUDA 12 less: "
            "pip uninstall -y cupy-cuda13x && pip install 'distgpt[cuda12x]'",
        ),
        ({**with_driver(gpus=(P100,)), **CUDA12}, "float32", "GPU 0 (Tesla P100)", "7.0 is needed"),
        (with_driver(gpus=(T4,)), "bfloat16", "capability 7.5", "bfloat16 needs 8.0; use --dtype float32"),
    ],
)
def test_each_thing_that_is_missing_has_its_remedy(change, dtype, what, remedy):
    (missing,) = missing_for_gpu(replace(GOOD, **change), dtype)
    assert what in missing.what
    assert missing.remedy == remedy if remedy.startswith("pip") else remedy in missing.remedy
    with pytest.raises(UsageError) as refused:
        require_gpu("mpi-cuda", dtype, replace(GOOD, **change))
    assert str(refused.value) == f"stage 'mpi-cuda' cannot run here: {missing}"


@pytest.mark.parametrize(
    "change, dtype",
    [
        (with_driver(gpus=(T4,)), "float32"),
        ({**with_driver(gpus=(V100,)), **CUDA12}, "float32"),
        ({**with_driver((12, 4)), **CUDA12}, "bfloat16"),
        (CUDA12, "bfloat16"),
        ({"packages": {"cupy": "14.2.0"}}, "bfloat16"),
    ],
)
def test_older_gpus_and_older_cuda_are_good_enough_where_they_fit(change, dtype):
    assert missing_for_gpu(replace(GOOD, **change), dtype) == []


def test_all_that_is_missing_is_told_on_one_line():
    nothing = Found(None, {}, {}, None)
    with pytest.raises(UsageError) as refused:
        require_gpu("cuda", found=nothing)
    said = str(refused.value)
    assert "\n" not in said
    assert said.index("libcuda.so.1") < said.index("CuPy")
    assert "NVRTC" not in said  # the same command brings it


@pytest.mark.parametrize(
    "change, several, remedies",
    [
        (without_library("cuDNN"), False, ["nvidia-cudnn-cu13"]),
        ({"packages": {"cupy-cuda13x": "14.2.0"}}, False, ["'nvidia-cudnn-frontend>=1.28,<1.33'"]),
        (without_library("NCCL"), False, []),
        (without_library("NCCL"), True, ["pip install nvidia-nccl-cu13"]),
        ({"libraries": {}, **CUDA12}, True, ["nvidia-cudnn-cu12", "nvidia-nccl-cu12"]),
    ],
)
def test_what_would_help_is_told_apart_from_what_is_needed(change, several, remedies):
    useful = useful_for_gpu(replace(GOOD, **change), several)
    assert len(useful) == len(remedies)
    assert all(remedy in each.remedy for each, remedy in zip(useful, remedies, strict=True))


def test_the_answer_comes_at_once_and_without_cupy():
    script = (
        "import sys, time; from distgpt.gpu.probe import *; begun = time.monotonic();"
        "missing_for_gpu(probe()); print(time.monotonic() - begun, *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, *loaded = result.stdout.split()
    assert float(seconds) < 10
    assert not set(loaded) & {"cupy", "numpy", "numba", "mpi4py"}


def test_what_is_missing_reads_as_a_sentence():
    assert str(Missing("no driver", "install one")) == "no driver: install one"

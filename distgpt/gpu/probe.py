"""Finds GPU drivers, packages, libraries and missing requirements of a GPU stage, without importing CuPy."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import UsageError

Version = tuple[int, int]

OLDEST_CUDA, NEWEST_CUDA = 12, 13
# Minimum compute capabilities for each CUDA version and for bfloat16.
OLDEST_GPU: dict[int, Version] = {12: (7, 0), 13: (7, 5)}
OLDEST_BFLOAT16: Version = (8, 0)

# Shared libraries; {} is the CUDA version.
LIBRARIES = {
    "NVRTC": "libnvrtc.so.{}",
    "cuBLASLt": "libcublasLt.so.{}",
    "cuDNN": "libcudnn.so.9",
    "NCCL": "libnccl.so.2",
}

CUPY = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13, "cupy": None}
PACKAGES = (
    *CUPY,
    *("nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "ml-dtypes"),
)

# Attributes and errors of cuda.h.
_MAJOR, _MINOR = 75, 76
_NO_DEVICE = 100
_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device visible to this process. `uuid` identifies it independently of its index."""

    name: str
    uuid: str
    capability: Version
    memory: int


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda`: the newest CUDA it supports. `problem`: the error if it does not start."""

    cuda: Version
    release: str
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing or wrong component, and the fix."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Found:
    """Versions of packages, and paths of libraries. `visible`: CUDA_VISIBLE_DEVICES."""

    driver: Driver | None
    packages: dict[str, str]
    libraries: dict[str, str]
    visible: str | None

    @property
    def cupy(self) -> list[str]:
        """The installed CuPy packages. There should be one."""
        return [name for name in CUPY if name in self.packages]


def driver() -> Driver | None:
    """Find the NVIDIA driver and the devices visible to this process; None without a driver."""
    if (cuda := _load("libcuda.so.1", ctypes.DEFAULT_MODE)) is None:
        return None
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    newest = (version.value // 1000, version.value % 1000 // 10)
    error = cuda.cuInit(0)
    if error:
        return Driver(newest, _release(), (), "" if error == _NO_DEVICE else _explained(cuda, error))
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Driver(newest, _release(), tuple(_gpu(cuda, i) for i in range(count.value)))


def _gpu(cuda: Any, ordinal: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, uuid, memory = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16), ctypes.c_size_t()
    # The _v2 function distinguishes the parts of a divided GPU.
    identify = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    identify(uuid, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), uuid.raw.hex(), (major.value, minor.value), memory.value)


def _explained(cuda: Any, error: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(error, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode(errors='replace')} (CUDA error {error})"


def _release() -> str:
    """Return the driver's version, the same as in `nvidia-smi`, or "" if the system hides it."""
    try:
        result = re.search(r"\d+\.\d+(\.\d+)?", _MODULE.read_text())
    except OSError:
        return ""
    return result[0] if result else ""


def packages() -> dict[str, str]:
    result = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def load_library(names: Sequence[str]) -> ctypes.CDLL | None:
    """Load the first of these libraries (the best name first) that can be loaded, or return None.

    A library that is already loaded comes first: a process must never load two copies of one library,
    perhaps with different versions.
    """
    for name in names:
        if (loaded := _load(name, os.RTLD_NOW | os.RTLD_NOLOAD)) is not None:
            return loaded
    for name in names:
        for candidate in (*map(str, _library_files(name)), name):
            if (library := _load(candidate, os.RTLD_NOW)) is not None:
                return library
    return None


def library_path(names: Sequence[str]) -> Path | None:
    """Return the first file of these names in PyPI's wheels or a CUDA toolkit, loadable or not."""
    return next((file for name in names for file in _library_files(name)), None)


def _load(name: str, mode: int) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=mode)
    except OSError:
        return None


def _library_files(name: str) -> Iterator[Path]:
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations if wheels else None) or ():
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit := os.environ.get(variable):
            for library in (Path(toolkit, "lib64", name), Path(toolkit, "lib", name)):
                if library.is_file():
                    yield library


def located(names: Sequence[str]) -> str | None:
    """Locate one of these libraries. Load it only if no file was found."""
    if (file := library_path(names)) is not None:
        return str(file)
    loaded = load_library(names)
    return str(loaded._name) if loaded else None


def probe() -> Found:
    installed, known = packages(), driver()
    built = [CUPY[name] for name in installed if CUPY.get(name)]
    cudas = built or ([known.cuda[0]] if known else [NEWEST_CUDA, OLDEST_CUDA])
    paths = {
        name: located(list(dict.fromkeys(file.format(cuda) for cuda in cudas)))
        for name, file in LIBRARIES.items()
    }
    result = {name: where for name, where in paths.items() if where is not None}
    return Found(known, installed, result, os.environ.get("CUDA_VISIBLE_DEVICES"))


def missing_for_gpu(found: Found, dtype: str = "float32") -> list[Missing]:
    """List everything that prevents a GPU stage from running, most fundamental first."""
    missing: list[Missing] = []
    driver, cuda, newest = found.driver, _cuda(found), _best_cuda(found)

    def lacks(what: str, remedy: str) -> None:
        missing.append(Missing(what, remedy))

    if driver is None:
        lacks("no NVIDIA driver found (libcuda.so.1)", "on a cluster, request a GPU node")
    elif driver.problem:
        lacks(
            f"the NVIDIA driver does not start ({driver.problem})",
            "if nvidia-smi also fails, ask the machine's administrator",
        )
    elif not driver.gpus:
        hidden = "" if found.visible is None else f" with CUDA_VISIBLE_DEVICES={found.visible!r}"
        lacks(
            f"the NVIDIA driver shows no GPU{hidden}",
            "nvidia-smi lists them; on a cluster, request GPUs (Slurm: --gpus-per-node)",
        )
    if driver and driver.cuda < (OLDEST_CUDA, 0):
        lacks(
            f"the NVIDIA driver supports only CUDA {dotted(driver.cuda)}",
            f"install a driver for CUDA {OLDEST_CUDA} or newer",
        )
    built = CUPY[found.cupy[0]] if len(found.cupy) == 1 else 0
    if not found.cupy:
        lacks("CuPy is not installed", _install(found, newest))
    elif built is not None and not OLDEST_CUDA <= built <= newest:
        lacks(
            f"CuPy for CUDA {newest} is required, not {', '.join(found.cupy)}",
            _install(found, newest),
        )
    else:
        for library, package in (("NVRTC", "nvidia-cuda-nvrtc"), ("cuBLASLt", "nvidia-cublas")):
            if library not in found.libraries:
                lacks(f"{library} not found", f"pip install {package}{'-cu12' * (cuda == 12)}")
    oldest = OLDEST_GPU[OLDEST_CUDA]
    for number, gpu in enumerate(driver.gpus if driver else ()):
        what = f"GPU {number} ({gpu.name}) has compute capability {dotted(gpu.capability)}"
        if gpu.capability < oldest:
            lacks(what, f"{dotted(oldest)} is required; CUDA_VISIBLE_DEVICES can select other GPUs")
        elif dtype == "bfloat16" and gpu.capability < OLDEST_BFLOAT16:
            lacks(what, f"bfloat16 requires {dotted(OLDEST_BFLOAT16)}; use --dtype float32")
    return missing


def _install(found: Found, cuda: int) -> str:
    """Return the command that installs distgpt's packages for this CUDA, replacing any other CuPy."""
    others = f"pip uninstall -y {' '.join(found.cupy)} && " if found.cupy else ""
    return f"{others}pip install 'distgpt[cuda{cuda}x]'"


def require_gpu(stage: str, dtype: str = "float32") -> None:
    """Raise an error with all missing requirements if a GPU stage cannot run here."""
    missing = missing_for_gpu(probe(), dtype)
    if missing:
        raise UsageError(f"stage {stage!r} cannot run here: {'; '.join(map(str, missing))}")


def _best_cuda(found: Found) -> int:
    """Return the CUDA version whose packages support the driver and all GPUs."""
    if found.driver is None:
        return NEWEST_CUDA
    newest = max(OLDEST_CUDA, min(found.driver.cuda[0], NEWEST_CUDA))
    return newest if all(gpu.capability >= OLDEST_GPU[newest] for gpu in found.driver.gpus) else OLDEST_CUDA


def _cuda(found: Found) -> int:
    """Return the CUDA version of this installation: CuPy's, if it is supported."""
    built = CUPY[found.cupy[0]] if len(found.cupy) == 1 else None
    return built if built in OLDEST_GPU else _best_cuda(found)


def dotted(version: Version) -> str:
    return ".".join(map(str, version))

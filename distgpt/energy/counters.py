"""Counters of energy on this host, in joules since they were opened.

Processors and memory: Linux's powercap (RAPL of Intel, and of AMD), or the driver amd_energy. GPUs: NVML.
Where a host shows none of these, Slurm may know what a job's nodes took.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

SYS = Path("/sys")
PROCESSORS, MEMORY, GPUS, NODES = "processors", "memory", "GPUs", "nodes"  # what is counted
SECONDS_FOR_SLURM = 10
UNKNOWN = 1 << 62  # from which on Slurm's number means that there is none


class Counter(Protocol):
    """Counts joules from when it was made. Reading may raise an OSError."""

    counted: str

    def read(self) -> float: ...


class Zone:
    """A file of microjoules that begins anew beyond `largest` (0: never): read it more often than that."""

    def __init__(self, path: Path, counted: str, largest: int = 0) -> None:
        self.counted = counted
        self._path, self._largest = path, largest
        self._last, self._sum = _number(path), 0

    def read(self) -> float:
        now = _number(self._path)
        self._sum += now - self._last + (self._largest if now < self._last else 0)
        self._last = now
        return self._sum / 1e6


def zones(root: Path = SYS) -> list[Zone]:
    """Open this host's counters of processors and memory; none where it has none.

    Raises a PermissionError if it has some that this user may not read.
    """
    return list(_powercap(root)) or list(_amd_energy(root))


def opened_zones(root: Path = SYS) -> tuple[list[Zone], str]:
    """Return this host's counters, and in words the one that this user may not read, "" if he may all."""
    try:
        return zones(root), ""
    except PermissionError as error:
        return [], f"{error.filename} on {platform.node()} is for root alone"
    except (OSError, ValueError):
        return [], ""


def _powercap(root: Path) -> Iterator[Zone]:
    """Yield packages, and memory beside them. A package contains its cores, and psys all of these.

    The folder lists zones within zones too: intel-rapl:0:2 is one of intel-rapl:0. Others, as
    intel-rapl-mmio:0, count the same once more.
    """
    folders = sorted((root / "class/powercap").glob("intel-rapl:*"))
    names = {folder.name: _text(folder / "name") for folder in folders}
    for folder in folders:
        name, parent = names[folder.name], names.get(folder.name.rpartition(":")[0], "")
        is_package = name.startswith("package")
        if is_package or (name == "dram" and parent.startswith("package")):
            largest = _number(folder / "max_energy_range_uj")
            yield Zone(folder / "energy_uj", PROCESSORS if is_package else MEMORY, largest)


def _amd_energy(root: Path) -> Iterator[Zone]:
    """Yield the sockets that the driver amd_energy shows, which contain their cores. It counts in 64 bits."""
    for folder in sorted((root / "class/hwmon").glob("hwmon*")):
        if _text(folder / "name") == "amd_energy":
            for label in sorted(folder.glob("energy*_label")):
                if _text(label).startswith("Esocket"):
                    yield Zone(label.with_name(label.name.replace("_label", "_input")), PROCESSORS)


class Gpus:
    """The GPUs with these ids, by NVIDIA's library for management. Raises an OSError where that cannot."""

    counted = GPUS

    def __init__(self, ids: Sequence[str], load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """`ids`: 32 digits each, as CUDA tells them."""
        self._nvml = load("libnvidia-ml.so.1")
        self._check(self._nvml.nvmlInit_v2())
        self._devices = [ctypes.c_void_p() for _ in ids]
        for device, digits in zip(self._devices, ids, strict=True):
            cuts = (0, 8, 12, 16, 20, 32)
            name = "GPU-" + "-".join(digits[a:b] for a, b in pairwise(cuts))
            self._check(self._nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)))
        self._before = self._millijoules()

    def _check(self, code: int) -> None:
        if code:
            raise OSError(f"NVML reports error {code}")

    def _millijoules(self) -> int:
        found = ctypes.c_ulonglong()
        total = 0
        for device in self._devices:
            self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(found)))
            total += found.value
        return total

    def read(self) -> float:
        return (self._millijoules() - self._before) / 1e3


class SlurmStep:
    """All nodes of this job's step, by Slurm's own counter, which a site may have set up."""

    counted = NODES

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises an OSError where Slurm does not count."""
        step = environ.get("SLURM_STEP_ID") or "batch"
        self._command = ["sstat", "-nPj", f"{environ['SLURM_JOB_ID']}.{step}", "-o", "ConsumedEnergyRaw"]
        if (before := self._joules()) in (0, None):  # 0: the plugin acct_gather_energy/none
            raise OSError("Slurm counts no energy here")
        self._before = before

    def _joules(self) -> int | None:
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, timeout=SECONDS_FOR_SLURM)
        except subprocess.TimeoutExpired:
            return None
        lines = done.stdout.split()
        return int(lines[0]) if lines and lines[0].isdecimal() and int(lines[0]) < UNKNOWN else None

    def read(self) -> float:
        if (now := self._joules()) is None:
            raise OSError("Slurm does not answer")
        return float(now - (self._before or 0))


class Meter:
    """The sum of some counters. Once one of them fails the sum is unknown, for ever."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counted = list(dict.fromkeys(each.counted for each in counters))
        self._counters = counters

    def read(self) -> float | None:
        """Return joules since the counters were opened; None where that is not known."""
        try:
            joules = sum(counter.read() for counter in self._counters)
        except (OSError, ValueError):  # a driver that was unloaded, a file that holds no number
            self._counters = ()
        return joules if self._counters else None


def meter_of_host(zones: Sequence[Zone], ids: Sequence[str]) -> Meter:
    """Return the sum of a host's zones, and of its GPUs with these ids."""
    with suppress(OSError, AttributeError):  # no such library, one without this function
        return Meter([*zones, *([Gpus(ids)] if ids else [])])
    return Meter(zones)


def meter_of_slurm() -> Meter:
    """Return what Slurm counts of this job's step."""
    with suppress(OSError):
        return Meter([SlurmStep()])
    return Meter([])


def _number(path: Path) -> int:
    return int(path.read_text())


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""

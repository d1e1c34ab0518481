"""Where a run runs, for its files and its first line: hosts, processors, batch job, launcher and MPI."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from distgpt.core.base.system import sysctl_text
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.batch import batch_job
from distgpt.core.comm.launched import launcher_name
from distgpt.core.config import WITH_MPI
from distgpt.core.cpu.stages import Stage

MOST_SHOWN = 4  # hosts


def whereabouts(stage: Stage) -> dict[str, Any]:
    """Return the facts that are known, ready for JSON. Collective."""
    hosts, processors = (_of_ranks(stage, fact) for fact in (platform.node(), processor_name()))
    found = {
        "hosts": compact(hosts),
        "processors": list(dict.fromkeys(processors)),
        "job": batch_job(),
        "launcher": launcher_name(),
        "mpi": _mpi(stage),
    }
    return {name: fact for name, fact in found.items() if fact}


def compact(hosts: Sequence[str]) -> list[str]:
    """["a", "a", "b"] → ["a:2", "b"], as in a hostfile of MPICH: in the order of the ranks."""
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    return [f"{host}:{ranks}" if ranks > 1 else host for host, ranks in runs]


def shown_hosts(hosts: Sequence[str]) -> str:
    """Return the hosts in words for a line; "" for a single one."""
    if len(hosts) < 2:
        return ""
    if len(hosts) <= MOST_SHOWN:
        return ", ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} … {hosts[-1]}"


def _of_ranks(stage: Stage, fact: str) -> list[str]:
    return [found.decode() for found in gather_bytes(stage.comm, fact.encode(errors="replace"))]


def _mpi(stage: Stage) -> str:
    if stage.name not in WITH_MPI:
        return ""
    from distgpt.core.comm.mpi import library  # which loads MPI

    return library()


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return sysctl_text("machdep.cpu.brand_string") or _core_name() or platform.machine()


def _core_name() -> str:
    """Return LLVM's name of the processor, for arm64 on Linux, which names none."""
    if platform.machine() != "aarch64":
        return platform.processor()
    try:
        from distgpt.core.cpu.compiling.processor import processor

        return processor()[0]
    except (ImportError, OSError):  # `distgpt doctor` says why
        return ""

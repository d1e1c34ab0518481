"""Where a run runs, for its files and its first line: hosts, processors, batch job, launcher and MPI."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from distgpt.core.base.system import sysctl_text
from distgpt.core.comm.agree import gather_texts
from distgpt.core.comm.job import this_job
from distgpt.core.config import WITH_MPI
from distgpt.core.cpu.stages import Stage

MOST_SHOWN = 4  # hosts


def whereabouts(stage: Stage) -> dict[str, Any]:
    """Return the facts that are known, ready for JSON. Collective."""
    job, mpi = this_job(), ""
    if stage.name in WITH_MPI:
        from distgpt.core.comm.mpi import library  # which loads MPI

        mpi = library()
    found = {
        "hosts": compact(gather_texts(stage.comm, platform.node())),
        "processors": list(dict.fromkeys(gather_texts(stage.comm, processor_name()))),  # each once
        "job": job.batch,
        "launcher": job.launcher,
        "mpi": mpi,
    }
    return {name: fact for name, fact in found.items() if fact}


def compact(hosts: Sequence[str]) -> list[str]:
    """["a", "a", "b"] → ["a:2", "b"], as in a hostfile of MPICH: in the order of the ranks."""
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    return [f"{host}:{ranks}" if ranks > 1 else host for host, ranks in runs]


def shown_hosts(hosts: Sequence[str]) -> str:
    """Return the hosts in words for a line; "" for a single one, unless a batch system has chosen it."""
    if len(hosts) < 2:
        return hosts[0].partition(":")[0] if this_job().batch else ""
    if len(hosts) <= MOST_SHOWN:
        return ", ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} … {hosts[-1]}"


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if brand := sysctl_text("machdep.cpu.brand_string"):
        return brand
    name = platform.processor()
    if platform.machine() == "aarch64":  # which Linux names nowhere, but LLVM knows
        try:
            from distgpt.core.cpu.compiling.processor import processor

            name = processor()[0]
        except (ImportError, OSError):  # `distgpt doctor` says why
            name = ""
    return name or platform.machine()

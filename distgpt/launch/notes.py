"""Lines before the first step, about the way the ranks were launched."""

from __future__ import annotations

import platform
from pathlib import Path

from distgpt.core.base.formatting import count
from distgpt.core.base.system import sysctl_text
from distgpt.core.comm.agree import gather_texts, named_ranks, ranks_by_text
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores, usable_cores
from distgpt.core.config import WITH_MPI


def launch_notes(comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
    """Return, on rank 0, what is slower than it looks. Collective."""
    texts = gather_texts(comm, _about_cores(comm, threads, threads_given))
    hosts = gather_texts(comm, host_id())
    if comm.rank:
        return []
    found = []
    if stage in WITH_MPI and comm.size == 1:
        found.append(f"--stage {stage} runs as one process: mpirun -n 2 distgpt … starts two")
    for text, ranks in ranks_by_text(texts).items():
        found.append(f"{named_ranks(ranks)}: " * (len(ranks) < comm.size) + text)
    if (here := hosts.count(hosts[0])) > comm.local_size:
        found.append(
            f"{here} ranks run on {platform.node()}, which the launcher takes for several hosts, so that they"
            " take each other's cores and memory; give a host one name in the hostfile"
        )
    return found


def _about_cores(comm: Comm, threads: int, threads_given: bool) -> str:
    """Return what this rank should know of its threads and cores; "" if they suit each other."""
    granted = granted_cores(comm.cores, comm.local_size)
    cpus, limit, several = len(usable_cores()), granted.limit, comm.local_size > 1
    each = " each" * several
    by = f" ({limit})" * bool(limit)
    if threads_given and threads > granted.whole:
        own = f"{granted.number:.3g} of " * (granted.number < cpus) + count(cpus, "CPU")
        return f"--threads {threads}, but {own}{each}{by}: threads without a core only make others wait"
    if several and granted.number < 1 - 1e-6:
        shared = f"{granted.number * comm.local_size:.3g} of " * bool(limit) + count(cpus, "CPU")
        return f"{comm.local_size} ranks share {shared}{by}: fewer ranks are as fast, or faster"
    if limit and not threads_given and threads == granted.whole:  # fewer: the layout's, one a core
        of = count(cpus, "CPU")
        return f"{limit} grants {granted.number:.3g} of {of}{each}: {count(threads, 'thread')}{each}"
    return ""


def host_id() -> str:
    """Return an id of this host, however many names it has."""
    return f"{platform.node()} {boot_id()}"


def boot_id() -> str:
    """Return an id of this machine since it started; "" where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return sysctl_text("kern.bootsessionuuid")

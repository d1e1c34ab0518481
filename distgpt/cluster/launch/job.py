"""The job of this process, as its launcher and its batch system tell of it."""

from __future__ import annotations

import platform
import signal
import time

from distgpt.cluster.launch.environment import batch_job, job_end, launched_as, launched_rank, launcher_name
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.base.system import host_id
from distgpt.core.comm.agree import gather_texts, named_ranks, ranks_by_text
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import Job, is_closed_pipe
from distgpt.core.comm.resources import granted_cores, usable_cores
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import SEVERAL, WITH_MPI


class Launched(Job):
    """A job whose launcher and batch system are asked, and whose ranks compare their commands.

    What only jobs of several ranks need is imported there.
    """

    @property
    def size(self) -> int:
        return launched_as()

    @property
    def rank(self) -> int:
        return launched_rank()

    @property
    def launcher(self) -> str:
        return launcher_name()

    @property
    def batch(self) -> dict[str, str] | None:
        return batch_job()

    def end(self, seconds: float | None) -> float | None:
        return job_end(seconds)

    def connect(self, stage: str) -> Comm:
        """Also refuse a launch that would not do what it looks like."""
        launched = launched_as()
        if stage not in WITH_MPI:
            if launched > 1:
                raise UsageError(
                    f"--stage {stage} was launched as {launched} processes, which would all do the same work;"
                    f" use --stage {SEVERAL[stage]}, or run without mpirun"
                )
            return SerialComm()
        from distgpt.cluster.launch.joining import start_mpi

        comm = start_mpi()
        if launched > 1 and comm.size == 1:
            from distgpt.cluster.launch.mpis import HELP, MPIS
            from distgpt.core.comm.mpi import library, vendor

            known = MPIS.get(vendor())
            raise UsageError(
                f"launched as {launched} processes, but mpi4py found itself alone: the launcher does not fit "
                f"mpi4py's {library()}; use the mpirun of {vendor()}"
                + (f", or {known.line(launcher_name()) or known.srun_line()}" if known else "")
                + f" ({HELP})"
            )
        return comm

    def meet(self, comm: Comm) -> None:
        if comm.size > 1:
            from distgpt.cluster.launch.joining import meet

            meet(comm)

    def notes(self, comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
        """Return, on rank 0, what is slower than it looks. Collective."""
        own = _about_cores(comm, threads, threads_given)
        if comm.size == 1:
            alone = f"--stage {stage} runs as one process: mpirun -n 2 distgpt … starts two"
            return [note for note in (alone * (stage in WITH_MPI), own) if note]
        texts = gather_texts(comm, own)
        hosts = gather_texts(comm, host_id())
        if comm.rank:
            return []
        found = []
        for text, ranks in ranks_by_text(texts).items():
            found.append(f"{named_ranks(ranks)}: " * (len(ranks) < comm.size) + text)
        if (here := hosts.count(hosts[0])) > comm.local_size:
            found.append(
                f"{here} ranks run on {platform.node()}, which the launcher takes for several hosts, so that"
                " they take each other's cores and memory; give a host one name in the hostfile"
            )
        return found

    def complain(self, complaint: str, code: int) -> int:
        if launched_as() == 1:
            return code
        from distgpt.cluster.launch.joining import complain

        return complain(complaint, code)

    def watch_exit(self, comm: Comm) -> None:
        from distgpt.cluster.launch.leaving import watch_exit

        watch_exit(comm)

    def leave(self, error: BaseException, comm: Comm | None) -> int:
        code = super().leave(error, comm)
        if isinstance(error, KeyboardInterrupt) and comm is None and launched_as() > 1:
            from distgpt.cluster.launch.leaving import die_of

            die_of(getattr(error, "number", signal.SIGINT))
        return code

    def report(self, error: BaseException, comm: Comm | None, rank: int, where: str) -> None:
        from distgpt.cluster.launch.leaving import SECONDS_FOR_RANK_0, report_library

        if isinstance(error, KeyboardInterrupt):
            if rank:
                time.sleep(SECONDS_FOR_RANK_0)
        elif comm is not None and not is_closed_pipe(error) and report_library(error, comm.rank):
            return
        super().report(error, comm, rank, where)


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


LAUNCHED = Launched()

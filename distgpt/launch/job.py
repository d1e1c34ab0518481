"""The job of this process, as its launcher and its batch system tell of it."""

from __future__ import annotations

import signal
import time

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import Job, is_closed_pipe
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import SEVERAL, WITH_MPI
from distgpt.launch.batch import batch_job, job_end
from distgpt.launch.launched import launched_as, launched_rank, launcher_name


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
        from distgpt.launch.joining import start_mpi

        comm = start_mpi()
        if launched > 1 and comm.size == 1:
            from distgpt.core.comm.mpi import library, vendor
            from distgpt.launch.mpis import HELP, MPIS

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
            from distgpt.launch.joining import meet

            meet(comm)

    def notes(self, comm: Comm, stage: str, threads: int, threads_given: bool) -> list[str]:
        from distgpt.launch.notes import launch_notes

        return launch_notes(comm, stage, threads, threads_given)

    def complain(self, complaint: str, code: int) -> int:
        if launched_as() == 1:
            return code
        from distgpt.launch.joining import complain

        return complain(complaint, code)

    def watch_exit(self, comm: Comm) -> None:
        from distgpt.launch.leaving import watch_exit

        watch_exit(comm)

    def leave(self, error: BaseException, comm: Comm | None) -> int:
        code = super().leave(error, comm)
        if isinstance(error, KeyboardInterrupt) and comm is None and launched_as() > 1:
            from distgpt.launch.leaving import die_of

            die_of(getattr(error, "number", signal.SIGINT))
        return code

    def report(self, error: BaseException, comm: Comm | None, rank: int, where: str) -> None:
        from distgpt.launch.leaving import SECONDS_FOR_RANK_0, report_library

        if isinstance(error, KeyboardInterrupt):
            if rank:
                time.sleep(SECONDS_FOR_RANK_0)
        elif comm is not None and not is_closed_pipe(error) and report_library(error, comm.rank):
            return
        super().report(error, comm, rank, where)


LAUNCHED = Launched()

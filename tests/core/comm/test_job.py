"""The job of a process: its exit among other ranks, and its time limit."""

import atexit
import io
import platform
import signal
import sys
from types import SimpleNamespace

import pytest
from distgpt.cluster.launch import job as launching
from distgpt.cluster.launch.job import Launched
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm import job as jobs
from distgpt.core.comm.agree import collective_error
from distgpt.core.comm.job import Job, exit_code


def rank(rank, size, abort=lambda code: None):
    return SimpleNamespace(rank=rank, size=size, abort=abort)


@pytest.mark.parametrize("job", [Job(), Launched()], ids=["plain", "launched"])
def test_error_of_one_rank_aborts_the_job(job, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "ignore_further", lambda: None)  # signals of this test
    ended = []
    rank_1, alone = rank(1, 2, ended.append), rank(0, 1, ended.append)
    for error, comm, code, is_aborted, said, is_traced in (
        (DataError("it is corrupt"), rank_1, 65, True, "rank 1: it is corrupt", False),
        (collective_error(DataError("it is corrupt")), rank_1, 65, False, "", False),  # printed by rank 0
        (Interrupted(2, shared=True), rank_1, 130, False, "", False),
        (StorageError("it is full"), alone, 74, False, "it is full", False),
        (OSError(28, "No space left", "f"), rank_1, 74, True, "rank 1: f: No space left", True),
        (SystemExit(3), rank_1, 3, True, "rank 1: exited with code 3", True),
    ):
        assert job.leave(error, comm) == code and ended == [code] * is_aborted
        ended.clear()
        printed = capsys.readouterr().err
        assert printed.startswith(f"distgpt: {said}") if said else not printed
        assert (type(error).__name__ in printed) == is_traced and (printed.count("\n") > 1) == is_traced


def test_batch_job_errors_name_the_host(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    Launched().leave(DataError("it is corrupt"), rank(3, 4))
    assert capsys.readouterr().err == f"distgpt: rank 3 on {platform.node()}: it is corrupt\n"


def test_interrupt_before_mpi_flushes_output(monkeypatch):
    monkeypatch.setattr(jobs, "ignore_further", lambda: None)
    for name in ("MPI_LOCALNRANKS", "PMI_SIZE"):
        monkeypatch.setenv(name, "2")
    pipe, killed = io.BytesIO(), []
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((number, pipe.getvalue())))
    print("a line")
    assert Launched().leave(Interrupted(15), None) == 143 and killed == [(15, b"a line\n")]


def test_open_mpi_ranks_wait_for_error_of_rank_0(capsys, monkeypatch):
    """Open MPI ends all ranks when one fails. The first rank of another host also prints the error."""
    said = []

    def start_mpi():
        raise UsageError("no MPI")

    monkeypatch.setattr(launching, "start_mpi", start_mpi)
    monkeypatch.setattr(launching.time, "sleep", said.append)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    for own, local, why, waits, is_told in (
        (0, 0, "no MPI", 0, 0),
        (1, 1, "no MPI", 1, 0),
        (2, 0, "no MPI", 1, 1),
        (2, 0, "another reason", 1, 0),
    ):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(own))
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local))
        assert Launched().complain(why, 2) == 2 and said == [launching.SECONDS_TO_START] * waits
        assert capsys.readouterr().err.count(f"rank {own} on {platform.node()}: no MPI") == is_told
        said.clear()


class World:
    def __init__(self, looks, clock):
        self.looks, self.seen, self.clock = looks, 0, clock
        self.COMM_WORLD = self
        self.Dup = self.Ibarrier = lambda: self

    def Is_finalized(self):
        return False

    def Test(self):
        self.seen += 1
        self.clock.now += 1
        return self.seen >= self.looks


@pytest.mark.parametrize(("code", "caught", "ends"), [(3, 0, [3]), ("why", 0, [1]), (0, 0, []), (3, 5, [])])
def test_sys_exit_of_one_rank_ends_the_job(code, caught, ends, monkeypatch):
    """A program may catch it and continue for `caught` seconds."""
    clock, registered = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None))
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "exit", sys.exit)  # put back
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=(world := World(12, clock))))
    ended = []
    (job := Launched()).watch_exit(rank(1, 2, ended.append))
    job.watch_exit(rank(1, 2))  # once per process
    with pytest.raises(SystemExit):
        sys.exit(code)
    clock.now += caught
    (wait_for_all,) = registered
    wait_for_all()
    assert world.seen == 12 and ended == ends


def test_errors_have_exit_codes():
    closed = SystemExit(1)
    closed.__context__ = BrokenPipeError()  # rich, after the reader has closed
    for error, code in (
        (KeyboardInterrupt(), 130), (Interrupted(15), 143), (BrokenPipeError(), 74), (closed, 74),
        (SystemExit(3), 3), (SystemExit(), 70), (ValueError(), 70), (MemoryError(), 70),
    ):  # fmt: skip
        assert exit_code(error) == code, error


def test_only_launched_jobs_have_an_end(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "99999999999")
    assert Job().end(None) is None and Job().end(5.0) is not None and Launched().end(None) is not None

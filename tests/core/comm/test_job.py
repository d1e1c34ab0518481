"""The job of a process: how it leaves the other ranks, and when it has to be gone."""

import platform
from types import SimpleNamespace

import pytest
from distgpt.cluster.launch.job import Launched
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm import job as jobs
from distgpt.core.comm.agree import shared
from distgpt.core.comm.job import Job, exit_code


@pytest.mark.parametrize("job", [Job(), Launched()], ids=["plain", "launched"])
def test_an_error_of_one_rank_alone_ends_the_job_and_one_of_all_does_not(job, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "ignore_further", lambda: None)  # signals of this test
    ended = []
    rank_1, alone = (SimpleNamespace(rank=rank, size=size, abort=ended.append) for rank, size in ((1, 2), (0, 1)))
    assert job.leave(DataError("it is damaged"), rank_1) == 65 and ended == [65]
    assert capsys.readouterr().err == "distgpt: rank 1: it is damaged\n"
    assert job.leave(shared(DataError("it is damaged")), rank_1) == 65 and ended == [65]
    assert capsys.readouterr().err == ""  # rank 0 says it
    assert job.leave(Interrupted(2, shared=True), rank_1) == 130 and ended == [65]
    assert job.leave(StorageError("it is full"), alone) == 74 and ended == [65]
    assert capsys.readouterr().err == "distgpt: it is full\n"
    assert job.leave(OSError(28, "No space left", "f"), rank_1) == 74 and ended == [65, 74]
    said = capsys.readouterr().err
    assert said.startswith("distgpt: rank 1: f: No space left\n") and "OSError" in said  # with its traceback


def test_in_a_batch_job_a_rank_has_its_host(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    rank_3 = SimpleNamespace(rank=3, size=4, abort=lambda code: None)
    Launched().leave(DataError("it is damaged"), rank_3)
    assert capsys.readouterr().err == f"distgpt: rank 3 on {platform.node()}: it is damaged\n"


def test_every_end_has_its_exit_code():
    closed = SystemExit(1)
    closed.__context__ = BrokenPipeError()  # as rich leaves when nobody reads any more
    for error, code in (
        (KeyboardInterrupt(), 130),
        (Interrupted(15), 143),
        (BrokenPipeError(), 74),
        (closed, 74),
        (SystemExit(3), 3),
        (SystemExit(), 70),
        (ValueError(), 70),
        (MemoryError(), 70),
    ):
        assert exit_code(error) == code, error


def test_a_plain_job_ends_only_when_it_is_told_to(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "99999999999")
    assert Job().end(None) is None and Job().end(5.0) is not None and Launched().end(None) is not None

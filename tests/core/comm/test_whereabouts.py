"""Where a run ran: hosts, batch job, launcher and MPI in its files, the time of day in its metrics."""

import json
import os
import platform
import re
import subprocess
import time
from types import SimpleNamespace

import pytest
from distgpt.cluster.launch.environment import batch_job
from distgpt.core.comm import mpi
from distgpt.core.train import lines as loglines
from distgpt.core.train.lines import Lines
from distgpt.core.train.report import compact, shown_hosts

from conftest import SCRIPT, SMALL, distgpt, inside, needs_mpi, train

JOBS = {
    "Slurm": {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"},
    "PBS": {"PBS_JOBID": "12", "PBS_JOBNAME": "mine"},
    "LSF": {"LSB_JOBID": "12", "LSB_JOBNAME": "mine"},
    "Grid Engine": {"JOB_ID": "12", "JOB_NAME": "mine", "SGE_TASK_ID": "undefined"},
}
SIGNS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SGE_TASK_ID")
IN_A_JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"}


def files(run):
    """The summary, and the first line of the history."""
    first = (run / "history.jsonl").read_text().splitlines()[0]
    return json.loads((run / "summary.json").read_text()), json.loads(first)


def test_a_run_of_one_process_says_where_it_ran(tmp_path):
    begun = time.time()
    ended = inside("train", *SMALL, "--steps", "3", "--out", tmp_path / "run", env=IN_A_JOB)
    assert ended.returncode == 0, ended.stderr
    for found in files(tmp_path / "run"):
        assert found["hosts"] == [platform.node()] and len(found["processors"]) == 1
        assert found["job"] == {"system": "Slurm", "id": "12", "name": "mine"}
        assert not found.keys() & {"mpi", "launcher"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines]
    assert begun < times[0] and times == sorted(times) and times[-1] < time.time()


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_ranks_say_where_they_ran(tmp_path):
    run = train(tmp_path / "run", "--steps", "2", ranks=2)
    for found in files(run):
        assert found["hosts"] == [f"{platform.node()}:2"] and "job" not in found
        assert re.fullmatch(r"[\w() ]*MP[\w() ]* v?\d[\w.]*", found["mpi"]) and "mpirun" in found["launcher"]
    assert files(run)[0]["environment"]["versions"]["mpi"] == found["mpi"]


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_several_hosts_are_named_as_it_begins(tmp_path):
    """Two names of this machine, since each rank gets one of its own."""
    own_name = ["unshare", "-u", "sh", "-c", 'hostname node$PMI_RANK && exec "$@"', "sh"]
    if subprocess.run([*own_name, "true"], capture_output=True).returncode:
        pytest.skip("only root may give a process another host name")
    words = ["train", "--stage", "mpi", *SMALL, "--steps", "2", "--out", tmp_path / "run"]
    ended = distgpt(*words, ranks=2, program=[*own_name, *SCRIPT])
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks on node0, node1, 1 thread each" in ended.stdout
    assert [found["hosts"] for found in files(tmp_path / "run")] == [["node0", "node1"]] * 2


def test_hosts_are_named_in_the_order_of_the_ranks(monkeypatch):
    for name in [name for name in os.environ if name in SIGNS]:
        monkeypatch.delenv(name)
    assert compact(["a", "a", "b", "b", "b", "a"]) == ["a:2", "b:3", "a"]
    assert shown_hosts(["a:2"]) == "" and shown_hosts(["a:2", "b"]) == "a:2, b"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert shown_hosts(["a:2"]) == "a"  # which nobody has chosen
    assert shown_hosts([f"n{i}:8" for i in range(64)]) == "n0:8, n1:8 … n63:8"


def test_a_batch_system_is_known_by_its_variables():
    for system, environ in JOBS.items():
        assert batch_job(environ) == {"system": system, "id": "12", "name": "mine"}
    assert batch_job({}) is None and batch_job({"JOB_ID": "12"}) is None  # which may be anything
    assert batch_job({"PBS_JOBID": "12"}) == {"system": "PBS", "id": "12"}
    assert batch_job({"SLURM_JOB_ID": ""}) is None


@needs_mpi
def test_the_library_is_named_in_a_few_words(monkeypatch):
    for said, name in (
        ("MPICH Version:      4.0.2\nMPICH Release date: …", "MPICH 4.0.2"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4\0", "Open MPI v4.1.4"),
        ("Intel(R) MPI Library 2021.9 for Linux* OS\n", "Intel(R) MPI Library 2021.9 for Linux* OS"),
    ):
        monkeypatch.setattr(mpi, "MPI", SimpleNamespace(Get_library_version=lambda said=said: said))
        assert mpi.library() == name


def test_lines_come_as_often_as_somebody_reads_them(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(loglines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for name in [name for name in os.environ if name in SIGNS]:
        monkeypatch.delenv(name)
    watched = Lines()
    watched.say("x")
    assert capsys.readouterr().out == "x\n"
    now[0] += 29
    assert watched._interval() == 2
    now[0] += 2
    assert watched._interval() == 10
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    in_a_job = Lines()
    in_a_job.say("x")
    assert in_a_job._interval() == 30 and re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]{8}  x\n", capsys.readouterr().out)
    monkeypatch.setattr(loglines.Output, "isatty", lambda self: True, raising=False)
    on_terminal = Lines()  # somebody has asked the batch system for one
    on_terminal.say("x")
    assert on_terminal._interval() == 2 and capsys.readouterr().out == "x\n"
    assert Lines(7)._interval() == 7


@pytest.mark.parametrize("words, shown", [([], 2), (["--log-lines", "0.0001s"], 9)])
def test_the_log_of_a_batch_job(tmp_path, words, shown):
    """The first step and the last, in less than half a minute; every line with the time of day."""
    ended = inside("train", *SMALL, "--steps", "9", *words, "--out", tmp_path / "run", env=IN_A_JOB)
    lines = ended.stdout.partition("\n\n")[0].splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines), ended.stdout
    assert sum("  step " in line for line in lines) == shown

"""The environment of a run in its files: hosts, batch job, launcher, MPI and times."""

import json
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

from conftest import SCRIPT, SMALL, distgpt, needs_mpi, succeeded, summary

SIGNS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SGE_TASK_ID")
IN_A_JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "mine"}


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    for name in SIGNS:
        monkeypatch.delenv(name, raising=False)


def files(run):
    return summary(run), json.loads((run / "history.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("words, shown", [([], 2), (["--log-lines", "0.0001s"], 9)])
def test_run_records_hosts_job_and_times(tmp_path, words, shown):
    """Lines have times; by default a short run prints its first and last step."""
    begun = time.time()
    ended = succeeded("train", *SMALL, "--steps", "9", *words, "--out", tmp_path / "run", env=IN_A_JOB)
    for found in files(tmp_path / "run"):
        assert found["hosts"] == [platform.node()] and len(found["processors"]) == 1
        assert found["job"] == {"system": "Slurm", "id": "12", "name": "mine"}
        assert not found.keys() & {"mpi", "launcher"}
    times = [json.loads(line)["time"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert begun < times[0] and times == sorted(times) and times[-1] < time.time()
    lines = ended.stdout.partition("\n\n")[0].splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines), ended.stdout
    assert sum("  step " in line for line in lines) == shown


@pytest.mark.smoke
@pytest.mark.ranks
@needs_mpi
def test_ranks_record_hosts_and_mpi(tmp_path):
    own_name = ["unshare", "-u", "sh", "-c", 'hostname node$PMI_RANK && exec "$@"', "sh"]
    is_root = not subprocess.run([*own_name, "true"], capture_output=True).returncode
    hosts = ["node0", "node1"] if is_root else [f"{platform.node()}:2"]
    words = ["train", "--stage", "mpi", *SMALL, "--steps", "2", "--out", tmp_path / "run"]
    ended = succeeded(*words, ranks=2, program=[*own_name, *SCRIPT] if is_root else SCRIPT, by=distgpt)
    assert ended.stdout.count("step 1/2") == ended.stdout.count("weights   ") == 1 and ended.stderr == ""
    assert f"2 ranks{' on node0, node1' * is_root}, 1 thread each" in ended.stdout
    for found in files(tmp_path / "run"):
        assert found["hosts"] == hosts and "job" not in found
        assert re.fullmatch(r"[\w() ]*MP[\w() ]* v?\d[\w.]*", found["mpi"]) and "mpirun" in found["launcher"]
    assert files(tmp_path / "run")[0]["environment"]["versions"]["mpi"] == found["mpi"]


def test_hosts_are_listed_in_rank_order(monkeypatch):
    assert compact(["a", "a", "b", "b", "b", "a"]) == ["a:2", "b:3", "a"]
    assert shown_hosts(["a:2"]) == "" and shown_hosts(["a:2", "b"]) == "a:2, b"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert shown_hosts(["a:2"]) == "a"  # chosen by Slurm
    assert shown_hosts([f"n{i}:8" for i in range(64)]) == "n0:8, n1:8 … n63:8"


def test_batch_job_is_read_from_variables():
    for system, environ in (
        ("Slurm", IN_A_JOB),
        ("PBS", {"PBS_JOBID": "12", "PBS_JOBNAME": "mine"}),
        ("LSF", {"LSB_JOBID": "12", "LSB_JOBNAME": "mine"}),
        ("Grid Engine", {"JOB_ID": "12", "JOB_NAME": "mine", "SGE_TASK_ID": "undefined"}),
    ):
        assert batch_job(environ) == {"system": system, "id": "12", "name": "mine"}
    assert batch_job({}) is None and batch_job({"JOB_ID": "12"}) is None  # ambiguous
    assert batch_job({"PBS_JOBID": "12"}) == {"system": "PBS", "id": "12"}
    assert batch_job({"SLURM_JOB_ID": ""}) is None


@needs_mpi
def test_mpi_library_name_is_short(monkeypatch):
    for said, name in (
        ("MPICH Version:      4.0.2\nMPICH Release date: …", "MPICH 4.0.2"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4\0", "Open MPI v4.1.4"),
        ("Intel(R) MPI Library 2021.9 for Linux* OS\n", "Intel(R) MPI Library 2021.9 for Linux* OS"),
    ):
        monkeypatch.setattr(mpi, "MPI", SimpleNamespace(Get_library_version=lambda said=said: said))
        assert mpi.library() == name


FACTS = dict.fromkeys(("parameters", "vocabulary", "corpus_tokens", "held_out_tokens", "ranks", "threads"), 1)
STEP = dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_s", "step_s"), 1.0)


@pytest.mark.parametrize(("job", "is_terminal", "seconds", "steps"), [
    ({}, False, None, [1, *range(3, 30, 2), 39, 49, 59, 69]),
    (IN_A_JOB, False, None, [1, 31, 61]),
    (IN_A_JOB, True, None, [1, *range(3, 30, 2), 39, 49, 59, 69]),  # interactive
    ({}, False, 20, [1, 21, 41, 61]),
])  # fmt: skip
def test_step_lines_are_rarer_in_batch_jobs(job, is_terminal, seconds, steps, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(loglines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(loglines.Output, "isatty", lambda self: is_terminal, raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    lines = Lines(seconds)
    lines.started(FACTS | {"steps": 999, "stage": "serial", "directory": "run"})
    for step in range(1, 70):
        now[0] += 1
        lines.stepped(STEP | {"step": step})
    printed = capsys.readouterr().out
    assert [int(step) for step in re.findall(r"^.*step +(\d+)/999", printed, re.MULTILINE)] == steps
    assert bool(re.match(r"\d{4}-\d\d-\d\d [\d:]{8}  \S", printed)) == (bool(job) and not is_terminal)

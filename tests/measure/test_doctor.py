"""The doctor: one report about all ranks, and an exit code that tells whether a stage can run here."""

import json
import os
import sys

import numpy as np
import pytest
from distgpt.cluster.jobs import launchers
from distgpt.cluster.launch.environment import launched_as, launcher_name
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import STAGES
from distgpt.gpu import probe
from distgpt.measure.doctor import facts
from distgpt.measure.doctor import report as doctor
from threadranks import on_all_ranks

from conftest import distgpt, inside, needs_mpi, refused

CLEAN = {"OPENBLAS_CORETYPE": ""}
LAUNCHED = {"launcher": "srun", "processes": 8}
MPI = {"problem": "", "vendor": "MPICH"}
has_driver = probe.driver() is not None
without_gpu = pytest.mark.skipif(has_driver, reason="this machine has an NVIDIA driver")


def ask(*args, ranks=0, **how):
    """The doctor's answer as JSON; it must succeed."""
    result = distgpt("doctor", "--json", *args, ranks=ranks, **how)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def warnings_about(word, report):
    return [warning for warning in report["warnings"] if word in warning]


# Alone


@pytest.fixture
def page(monkeypatch):
    """Call the doctor in this process, which has the MPI from elsewhere."""
    monkeypatch.setattr(doctor, "distant_mpi", lambda: {**MPI, "version": "5"})
    return lambda *words, **more: inside("doctor", *words, env={**CLEAN, **more})


@pytest.mark.ci
@pytest.mark.ranks
def test_alone_it_tells_about_every_stage(page):
    report = json.loads(page("--json").stdout)
    assert list(report["stages"]) == list(STAGES)
    assert report["stages"]["serial"] == {"runs": True, "missing": [], "notes": []}
    (rank,) = report["ranks"]
    assert rank["versions"]["numpy"] == np.__version__ and rank["compute"]["blas"]
    assert rank["core_share"] == rank["cores"] == len(os.sched_getaffinity(0))
    assert 0 < rank["memory"]["available"] <= rank["memory"]["total"]
    assert warnings_about("OPENBLAS", report) == []


@pytest.mark.ci
@pytest.mark.ranks
def test_the_page_fits_and_has_no_colours_in_a_pipe(page):
    result = page("--stage", "serial", OPENBLAS_CORETYPE="Zen")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and "\x1b" not in result.stdout
    assert "OPENBLAS_CORETYPE=Zen overrides" in result.stdout
    assert [line.split()[0] for line in lines if line.strip().startswith(STAGES)] == list(STAGES)


@pytest.mark.ci
@pytest.mark.ranks
@without_gpu
def test_a_stage_without_its_gpu_is_an_error_that_names_the_driver(page):
    for stage in ("cuda", "mpi-cuda"):
        result = page("--stage", stage)
        refused(result, 2, f"'{stage}'", "no NVIDIA driver was found (libcuda.so.1)", "ask for a GPU node")
        assert "cannot run: no NVIDIA driver" in result.stdout


@pytest.mark.ci
@pytest.mark.ranks
def test_a_numba_that_does_not_load_is_reported_with_what_to_install(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "distgpt.core.cpu.matmul.blas", None)
    refused(page("--stage", "serial"), 2, "NumPy or Numba does not work", "pip install")


@pytest.mark.ci
def test_an_mpi_that_does_not_load_or_ends_its_process_does_not_end_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for how, words in (
        ("os._exit(0)", "MPI ended the process that started it"),
        ("os.abort()", "no PMI here"),
        ("raise ImportError('planted')", "(planted); install them with pip install 'distgpt[mpich]'"),
    ):
        text = f"import os, sys\nprint('no PMI here', file=sys.stderr, flush=True)\n{how}\n"
        (tmp_path / "mpi4py" / "__init__.py").write_text(text)
        assert words in launchers.distant_mpi()["problem"], how


# Under a launcher


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_several_ranks_make_one_report_about_all():
    n_cores = len(os.sched_getaffinity(0))
    n_ranks = n_cores + 1 if n_cores < 5 else 2
    report = ask("--stage", "mpi", ranks=n_ranks, env=CLEAN)
    for name in ("rank", "local_rank"):
        assert [rank[name] for rank in report["ranks"]] == list(range(n_ranks))
    assert 0 < sum(rank["core_share"] for rank in report["ranks"]) <= n_cores + 1e-6
    assert report["launch"]["processes"] == n_ranks and report["mpi"]["vendor"]
    assert report["stages"]["mpi"]["runs"] and not report["stages"]["serial"]["runs"]
    crowded = warnings_about("more ranks than cores", report)
    assert len(crowded) == (n_ranks > n_cores)
    assert all(warning.startswith(f"ranks 0–{n_ranks - 1} on") for warning in crowded)


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_two_ranks_leave_together_with_one_line():
    result = distgpt("doctor", "--stage", "serial", ranks=2)
    refused(result, 2, "all do the same work")
    assert result.stdout.count("distgpt 0") == 1


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_a_launcher_of_another_mpi_is_reported_by_one_process():
    result = distgpt("doctor", "--stage", "mpi", env={"PMI_SIZE": "2", "PMI_RANK": "0"})
    refused(result, 2, "stage 'mpi' cannot run here", "launched as 2 processes", "found itself alone")
    assert "2 processes by" in result.stdout
    result = distgpt("doctor", "--stage", "mpi", env={"PMI_SIZE": "2", "PMI_RANK": "1"})
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


# Larger jobs than a test can start: facts as eight ranks on two hosts would give them


@pytest.fixture(scope="module")
def ranks():
    mine = json.loads(json.dumps(facts.of_rank(SerialComm())))
    gpu = [{"name": "A", "uuid": str(i), "capability": [9, 0], "memory": 1} for i in range(4)]
    driver = {"cuda": [13, 0], "release": "", "gpus": gpu, "problem": ""}
    found = {**mine["gpu"], "driver": driver, "missing": {"float32": [], "bfloat16": []}}
    mine |= {"local_size": 4, "core_share": 4.0, "cores": 16, "cores_of_host": 16}
    mine |= {"environment": {}, "granted_cores": {"number": 4.0, "limit": ""}}
    return [
        {**mine, "rank": rank, "local_rank": rank % 4, "host": f"node{rank // 4}"}
        | {"gpu": {**found, "takes": rank % 4}}
        for rank in range(8)
    ]


def changed(ranks, numbers, **change):
    return [{**rank, **change} if rank["rank"] in numbers else rank for rank in ranks]


def test_only_ranks_that_share_a_gpu_are_told(ranks):
    """GPUs of the same number on two hosts, or the only one that each rank sees, are not shared."""

    def with_one(gpu, number):
        return {**gpu, "takes": 0, "driver": {**gpu["driver"], "gpus": [gpu["driver"]["gpus"][number]]}}

    alone = [{**rank, "gpu": with_one(rank["gpu"], rank["rank"] % 4)} for rank in ranks]
    for found in (ranks, alone):
        assert doctor.warnings(LAUNCHED, MPI, found) == []
    two = [{**ranks[number], "host": "node0"} for number in (0, 4)]
    warnings = doctor.warnings(LAUNCHED, MPI, two)
    assert "ranks 0, 4 on node0 share one A and its memory: start one rank per GPU" in warnings


def test_traps_are_reported_with_their_ranks(ranks):
    set_here = {"OPENBLAS_CORETYPE": "Haswell"}
    nowhere = {**ranks[0]["compute"], "loops": None}
    for numbers, change, words in (
        ({4, 5}, {"versions": {"numpy": "1.0"}}, ["different versions of numpy", "1.0 on ranks 4–5"]),
        (range(4), {"core_share": 0.5}, ["ranks 0–3 on node0 share 2 cores"]),
        (range(4, 8), {"core_share": 1.0}, ["ranks 4–7 on node1 may use 4 of 16 cores", "--bind-to none"]),
        ({7}, {"environment": set_here}, ["OPENBLAS_CORETYPE=Haswell overrides"]),
        (range(8), {"compute": nowhere}, ["compiled loops cannot be kept"]),
        ({2, 3}, {"compute": nowhere}, ["ranks 2–3: compiled loops cannot be kept"]),
    ):
        found = doctor.warnings(LAUNCHED, MPI, changed(ranks, numbers, **change))
        (found,) = [warning for warning in found if words[0] in warning]
        assert all(word in found for word in words)


def test_a_host_without_its_driver_stops_the_gpu_stage_with_its_ranks(ranks):
    lost = [{"what": "no driver", "remedy": "ask for one"}]
    broken = changed(ranks, {2, 6, 7}, gpu={**ranks[0]["gpu"], "missing": {"float32": lost, "bfloat16": lost}})
    stages = doctor.verdicts(LAUNCHED, MPI, broken)
    assert stages["mpi-cuda"]["missing"] == [{**lost[0], "ranks": [2, 6, 7]}]
    assert doctor.sentence(stages["mpi-cuda"]["missing"][0]) == "ranks 2, 6–7: no driver: ask for one"
    assert stages["mpi"]["runs"] and not stages["cuda"]["runs"]


# What it stands on


def test_launchers_are_known_by_what_they_leave():
    mpich = {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    for environment, launcher, processes in (
        ({}, "", 1),
        (mpich, "mpirun of MPICH or a relative", 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpirun", 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, "srun", 8),
        ({"SLURM_NTASKS": "8"}, "", 1),
        ({"PMI_SIZE": "many"}, "", 1),
    ):
        assert (launcher_name(environment), launched_as(environment)) == (launcher, processes)


def test_bytes_of_any_length_reach_every_rank():
    for pieces in ([b"", b"\xff" * 70_000, b"c"], [b"", b"", b""], [b"\x00a", b"", b"\x00"]):
        assert on_all_ranks(3, lambda comm, own=pieces: gather_bytes(comm, own[comm.rank])) == [pieces] * 3

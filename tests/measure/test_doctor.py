"""The doctor: one report about all ranks, and an exit code that tells whether a stage can run here."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.jobs import launchers
from distgpt.cluster.launch import job
from distgpt.cluster.launch.environment import launched_as, launcher_name
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.resources import Cores
from distgpt.core.config import STAGES
from distgpt.gpu import probe
from distgpt.measure.doctor import facts
from distgpt.measure.doctor import report as doctor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from threadranks import on_all_ranks
from trees import TREES, sys_of

from conftest import distgpt, inside, needs_mpi, refused

CLEAN = {"OPENBLAS_CORETYPE": ""}
LAUNCHED = {"launcher": "srun", "processes": 8}
MPI = {"problem": "", "vendor": "MPICH"}
has_driver = probe.driver() is not None
without_gpu = pytest.mark.skipif(has_driver, reason="this machine has an NVIDIA driver")


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
def test_alone_it_tells_about_every_stage_on_a_page_that_fits(page):
    report = json.loads(page("--json").stdout)
    assert list(report["stages"]) == list(STAGES)
    assert report["stages"]["serial"] == {"runs": True, "missing": [], "notes": []}
    (rank,) = report["ranks"]
    assert rank["versions"]["numpy"] == np.__version__ and rank["compute"]["blas"]
    assert rank["core_share"] == rank["cores"] == len(os.sched_getaffinity(0))
    assert 0 < rank["memory"]["available"] <= rank["memory"]["total"]
    assert warnings_about("OPENBLAS", report) == []
    result = page("--stage", "serial", OPENBLAS_CORETYPE="Zen")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and "\x1b" not in result.stdout
    assert "OPENBLAS_CORETYPE=Zen" in result.stdout
    assert [line.split()[0] for line in lines if line.strip().startswith(STAGES)] == list(STAGES)


@pytest.mark.ci
@pytest.mark.ranks
@without_gpu
def test_a_stage_without_its_gpu_is_an_error_that_names_the_driver(page):
    for stage in ("cuda", "mpi-cuda"):
        result = page("--stage", stage)
        refused(result, 2, f"'{stage}'", "no NVIDIA driver found (libcuda.so.1)", "request a GPU node")
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
        ("os._exit(0)", "MPI failed to start"),
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
    result = distgpt("doctor", "--json", "--stage", "mpi", ranks=n_ranks, env=CLEAN)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    for name in ("rank", "local_rank"):
        assert [rank[name] for rank in report["ranks"]] == list(range(n_ranks))
    assert 0 < sum(rank["core_share"] for rank in report["ranks"]) <= n_cores + 1e-6
    assert report["launch"]["processes"] == n_ranks and report["mpi"]["vendor"]
    assert report["stages"]["mpi"]["runs"] and not report["stages"]["serial"]["runs"]
    crowded = warnings_about("at most one rank per core", report)
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
    refused(result, 2, "stage 'mpi' cannot run here", "launched as 2 processes", "found only one")
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
    assert "ranks 0, 4 on node0 share one A and its memory; start one rank per GPU" in warnings


def test_traps_are_reported_with_their_ranks(ranks):
    set_here = {"OPENBLAS_CORETYPE": "Haswell"}
    nowhere = {**ranks[0]["compute"], "loops": None}
    for numbers, change, words in (
        ({4, 5}, {"versions": {"numpy": "1.0"}}, ["different versions of numpy", "1.0 on ranks 4–5"]),
        (range(4), {"core_share": 0.5}, ["ranks 0–3 on node0 share 2 cores"]),
        (range(4, 8), {"core_share": 1.0}, ["ranks 4–7 on node1 may use 4 of 16 cores", "--bind-to none"]),
        ({7}, {"environment": set_here}, ["OPENBLAS_CORETYPE=Haswell overrides"]),
        (range(8), {"compute": nowhere}, ["cannot cache compiled loops"]),
        ({2, 3}, {"compute": nowhere}, ["ranks 2–3: cannot cache compiled loops"]),
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
        (mpich, "an mpirun of MPICH or a derivative", 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpirun", 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, "srun", 8),
        ({"SLURM_NTASKS": "8"}, "", 1),
        ({"PMI_SIZE": "many"}, "", 1),
    ):
        assert (launcher_name(environment), launched_as(environment)) == (launcher, processes)


@given(st.lists(st.binary(max_size=300), min_size=3, max_size=3))
@example([b"", b"\xff" * 70_000, b"c"])
@settings(max_examples=10)
def test_bytes_of_any_length_reach_every_rank(pieces):
    assert on_all_ranks(3, lambda comm: gather_bytes(comm, pieces[comm.rank])) == [pieces] * 3


# Recorded nodes


@pytest.fixture
def node_of(monkeypatch):
    """Return the facts of a recorded node."""

    def node(name, granted=0.0):
        cpus = TREES[name].affinity
        monkeypatch.setattr(doctor, "usable_cores", lambda: cpus)
        monkeypatch.setattr(doctor, "granted_cores", lambda: Cores(granted or len(cpus)))
        monkeypatch.setattr(doctor, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        return json.loads(json.dumps(doctor.node()))

    return node


@pytest.mark.parametrize("name", TREES)
def test_a_node_is_counted_as_a_person_counts_it(name, node_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    node, seen = node_of(name), TREES[name].seen
    counted = node["cpus"], node["cores"], node["sockets"], node["regions"]
    assert counted == (seen.cpus, seen.cores, seen.sockets, max(1, seen.regions))
    page = "\n".join(doctor.rows([("node", doctor.summary(node)), ("best", doctor.advice(node))]))
    lines = page.splitlines()
    assert len(lines) <= 6 and max(map(len, lines)) <= 80


def test_the_advice_fits_the_node(node_of):
    archer2 = doctor.advice(node_of("archer2"))
    assert "mpirun -n 8 " in archer2 and "16 threads" in archer2
    assert "--bind-to none -n 8 …" in archer2  # what Open MPI needs
    laptop = node_of("alder lake")
    assert laptop["suits"]["threads"] == 6 and "are slow and stay idle" in doctor.summary(laptop)
    assert node_of("container", granted=0.5)["suits"]["threads"] == 1
    assert doctor.summary(node_of("cascade lake")) == "2 sockets, 2 NUMA regions, 48 cores, 96 CPUs"


# Launch lines

HYDRA, OPEN = ({"path": f"/none/{who}/mpirun", "vendor": who} for who in ("MPICH", "Open MPI"))
NOWHERE = {"path": None, "vendor": ""}
TRAIN = "-n 2 distgpt train --stage mpi"


def around(mpirun, as_root=False):
    """The facts of a process that nothing has launched."""
    return {"launcher": "", "processes": 1, "mpirun": mpirun, "as_root": as_root}


def of(vendor):
    return {"problem": "", "vendor": vendor, "library": f"/none/{vendor}/libmpi.so"}


@pytest.mark.parametrize(
    ("facts", "vendor", "words", "line"),
    [
        (around(HYDRA), "MPICH", [], "/none/MPICH/mpirun"),
        (around(HYDRA), "Intel MPI", [], "/none/MPICH/mpirun"),  # both speak the PMI of Hydra
        (around(HYDRA), "Open MPI", ["mpirun belongs to MPICH", "the mpirun of Open MPI"], ""),
        (around(OPEN), "MPICH", ["belongs to Open MPI", "the mpirun of MPICH"], ""),
        (around(NOWHERE), "MPICH", ["mpirun not found in PATH", job.HELP], ""),
        (around(OPEN, True), "Open MPI", ["--allow-run-as-root"], "/none/Open MPI/mpirun --allow-run-as-root"),
        (around(HYDRA, True), "MPICH", [], "/none/MPICH/mpirun"),
        (around(HYDRA), "an unknown MPI", [], ""),
    ],
)
def test_launch_lines_fit_the_mpi_and_traps_are_named(facts, vendor, words, line):
    found = list(doctor.launch_problems(facts, of(vendor)))
    assert len(found) == bool(words) and all(word in found[0] for word in words), found
    assert doctor.launch_lines(facts, of(vendor)) == [f"{line} {TRAIN}"] * bool(line)


def test_a_broken_mpi_or_a_launcher_at_work_has_no_launch_lines():
    for launched, found in (
        (around(OPEN), {"problem": "it does not start"}),
        ({"launcher": "srun", "processes": 2}, of("Open MPI")),
    ):
        assert [*doctor.launch_problems(launched, found), *doctor.launch_lines(launched, found)] == []


def test_the_file_of_the_library_is_the_one_in_use():
    assert pytest.importorskip("distgpt.core.comm.mpi").MPI  # loads it
    assert Path(launchers.library_file()).name.startswith("libmpi")


def test_open_mpi_may_be_asked_to_start_for_root(monkeypatch):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    one, other = doctor.ROOT[0]
    for environ, is_refused in (({}, True), ({one: "1"}, True), ({one: "1", other: "1"}, False)):
        assert doctor.is_refused_as_root(environ) == is_refused
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 7)
    assert not doctor.is_refused_as_root({})


@pytest.mark.parametrize(
    "size, vendor, line",
    [
        ("SLURM_STEP_NUM_TASKS", "MPICH", "srun --mpi=pmi2"),
        ("SLURM_STEP_NUM_TASKS", "Open MPI", "srun --mpi=pmix"),
        ("SLURM_STEP_NUM_TASKS", "Cray MPICH", "srun --mpi=cray_shasta"),
        ("FLUX_JOB_SIZE", "MPICH", "flux run -o pmi=simple"),
        ("FLUX_JOB_SIZE", "Open MPI", "flux run -o pmi=simple,pmix"),
    ],
)
def test_ranks_that_find_themselves_alone_are_told_the_line_for_their_mpi(size, vendor, line, monkeypatch):
    mpi = pytest.importorskip("distgpt.core.comm.mpi")
    monkeypatch.setattr(job, "start_mpi", lambda: SimpleNamespace(size=1))
    monkeypatch.setattr(mpi, "vendor", lambda: vendor)
    monkeypatch.setenv(size, "4")
    with pytest.raises(UsageError, match=f"4 processes.*mpirun of {vendor}, or {line} .distgpt help"):
        job.Launched().connect("mpi")

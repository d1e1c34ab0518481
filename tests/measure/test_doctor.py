"""`distgpt doctor`: one report for all ranks, an exit code for each stage, and caches that others use."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.jobs import launchers
from distgpt.cluster.launch import job
from distgpt.cluster.launch.environment import launched_as, launcher_name
from distgpt.core.base import caches
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.resources import Cores
from distgpt.core.config import STAGES
from distgpt.core.cpu.compiling import disk_cache
from distgpt.gpu import probe
from distgpt.measure.doctor import facts
from distgpt.measure.doctor import report as doctor
from trees import TREES, sys_of

from conftest import ci_ranks, distgpt, inside, refused, slow_ranks, succeeded

CLEAN = {"OPENBLAS_CORETYPE": ""}
LAUNCHED = {"launcher": "srun", "processes": 8}
MPI = {"problem": "", "vendor": "MPICH"}
has_driver = probe.driver() is not None
without_gpu = pytest.mark.skipif(has_driver, reason="this machine has an NVIDIA driver")


def warnings_about(word, report):
    return [warning for warning in report["warnings"] if word in warning]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr(doctor, "distant_mpi", lambda: {**MPI, "version": "5"})
    return lambda *words, **more: inside("doctor", *words, env={**CLEAN, **more})


@pytest.mark.ci
@pytest.mark.ranks
def test_doctor_reports_every_stage_in_100_columns(page):
    report = json.loads(page("--json").stdout)
    assert list(report["stages"]) == list(STAGES)
    assert report["stages"]["serial"] == {"runs": True, "missing": [], "notes": []}
    (rank,) = report["ranks"]
    assert rank["versions"]["numpy"] == np.__version__ and rank["compute"]["blas"]
    assert rank["core_share"] == rank["cores"] == len(os.sched_getaffinity(0))
    assert 0 < rank["memory"]["available"] <= rank["memory"]["total"] and warnings_about("OPENBLAS", report) == []
    result = page("--stage", "serial", OPENBLAS_CORETYPE="Zen")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and "\x1b" not in result.stdout and "OPENBLAS_CORETYPE=Zen" in result.stdout
    assert [line.split()[0] for line in lines if line.strip().startswith(STAGES)] == list(STAGES)


@pytest.mark.ci
@pytest.mark.ranks
@without_gpu
def test_missing_gpu_driver_is_an_error(page):
    for stage in ("cuda", "mpi-cuda"):
        result = page("--stage", stage)
        refused(result, 2, f"'{stage}'", "no NVIDIA driver found (libcuda.so.1)", "request a GPU node")
        assert "cannot run: no NVIDIA driver" in result.stdout


@pytest.mark.ci
@pytest.mark.ranks
def test_broken_numba_reports_what_to_install(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "distgpt.core.cpu.matmul.blas", None)
    refused(page("--stage", "serial"), 2, "NumPy or Numba does not work", "pip install")


@pytest.mark.ci
def test_broken_mpi_does_not_end_doctor(tmp_path, monkeypatch):
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


@slow_ranks
def test_ranks_make_one_report():
    n_cores = len(os.sched_getaffinity(0))
    n_ranks = n_cores + 1 if n_cores < 5 else 2
    result = succeeded("doctor", "--json", "--stage", "mpi", ranks=n_ranks, env=CLEAN, by=distgpt)
    report = json.loads(result.stdout)
    for name in ("rank", "local_rank"):
        assert [rank[name] for rank in report["ranks"]] == list(range(n_ranks))
    assert 0 < sum(rank["core_share"] for rank in report["ranks"]) <= n_cores + 1e-6
    assert report["launch"]["processes"] == n_ranks and report["mpi"]["vendor"]
    assert report["stages"]["mpi"]["runs"] and not report["stages"]["serial"]["runs"]
    crowded = warnings_about("at most one rank per core", report)
    assert len(crowded) == (n_ranks > n_cores)
    assert all(warning.startswith(f"ranks 0–{n_ranks - 1} on") for warning in crowded)


@ci_ranks
def test_ranks_exit_together_with_one_error():
    result = distgpt("doctor", "--stage", "serial", ranks=2)
    refused(result, 2, "all do the same work")
    assert result.stdout.count("distgpt 0") == 1


@slow_ranks
def test_foreign_launcher_is_reported_once():
    result = distgpt("doctor", "--stage", "mpi", env={"PMI_SIZE": "2", "PMI_RANK": "0"})
    refused(result, 2, "stage 'mpi' cannot run here", "launched as 2 processes", "found only one")
    assert "2 processes by" in result.stdout
    result = distgpt("doctor", "--stage", "mpi", env={"PMI_SIZE": "2", "PMI_RANK": "1"})
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


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


def test_doctor_warns_only_ranks_sharing_a_gpu(ranks):
    """GPUs with equal numbers on two hosts, or the single visible GPU of each rank, are not shared."""

    def with_one(gpu, number):
        return {**gpu, "takes": 0, "driver": {**gpu["driver"], "gpus": [gpu["driver"]["gpus"][number]]}}

    for found in (ranks, [{**rank, "gpu": with_one(rank["gpu"], rank["rank"] % 4)} for rank in ranks]):
        assert doctor.warnings(LAUNCHED, MPI, found) == []
    warnings = doctor.warnings(LAUNCHED, MPI, [{**ranks[number], "host": "node0"} for number in (0, 4)])
    assert "ranks 0, 4 on node0 share one A and its memory; start one rank per GPU" in warnings


def test_doctor_warnings_name_ranks(ranks):
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


def test_missing_driver_names_ranks_of_gpu_stage(ranks):
    lost = [{"what": "no driver", "remedy": "ask for one"}]
    broken = changed(ranks, {2, 6, 7}, gpu={**ranks[0]["gpu"], "missing": {"float32": lost, "bfloat16": lost}})
    stages = doctor.verdicts(LAUNCHED, MPI, broken)
    assert stages["mpi-cuda"]["missing"] == [{**lost[0], "ranks": [2, 6, 7]}]
    assert doctor.sentence(stages["mpi-cuda"]["missing"][0]) == "ranks 2, 6–7: no driver: ask for one"
    assert stages["mpi"]["runs"] and not stages["cuda"]["runs"]


def test_launcher_is_detected_from_environment():
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


@pytest.fixture
def node_of(monkeypatch):
    def node(name, granted=0.0):
        cpus = TREES[name].affinity
        monkeypatch.setattr(doctor, "usable_cores", lambda: cpus)
        monkeypatch.setattr(doctor, "granted_cores", lambda: Cores(granted or len(cpus)))
        monkeypatch.setattr(doctor, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        return json.loads(json.dumps(doctor.node()))

    return node


def test_doctor_advice_fits_the_node(node_of):
    archer2 = doctor.advice(node_of("archer2"))
    assert "mpirun -n 8 " in archer2 and "16 threads" in archer2
    assert "--bind-to none -n 8 …" in archer2  # Open MPI's option
    laptop = node_of("alder lake")
    assert laptop["suits"]["threads"] == 6 and "are slow and stay idle" in doctor.summary(laptop)
    assert node_of("container", granted=0.5)["suits"]["threads"] == 1
    assert doctor.summary(node_of("cascade lake")) == "2 sockets, 2 NUMA regions, 48 cores, 96 CPUs"


HYDRA, OPEN = ({"path": f"/none/{who}/mpirun", "vendor": who} for who in ("MPICH", "Open MPI"))
NOWHERE = {"path": None, "vendor": ""}
TRAIN = "-n 2 distgpt train --stage mpi"


def around(mpirun, as_root=False):
    return {"launcher": "", "processes": 1, "mpirun": mpirun, "as_root": as_root}


def of(vendor):
    return {"problem": "", "vendor": vendor, "library": f"/none/{vendor}/libmpi.so"}


@pytest.mark.parametrize(("facts", "vendor", "words", "line"), [
    (around(HYDRA), "MPICH", [], "/none/MPICH/mpirun"),
    (around(HYDRA), "Intel MPI", [], "/none/MPICH/mpirun"),  # both use Hydra's PMI
    (around(HYDRA), "Open MPI", ["mpirun belongs to MPICH", "the mpirun of Open MPI"], ""),
    (around(OPEN), "MPICH", ["belongs to Open MPI", "the mpirun of MPICH"], ""),
    (around(NOWHERE), "MPICH", ["mpirun not found in PATH", job.HELP], ""),
    (around(OPEN, True), "Open MPI", ["--allow-run-as-root"], "/none/Open MPI/mpirun --allow-run-as-root"),
    (around(HYDRA, True), "MPICH", [], "/none/MPICH/mpirun"),
    (around(HYDRA), "an unknown MPI", [], ""),
    (around(OPEN), {"problem": "it does not start"}, [], ""),
    ({"launcher": "srun", "processes": 2}, "Open MPI", [], ""),
])  # fmt: skip
def test_launch_lines_fit_the_mpi(facts, vendor, words, line):
    mpi = of(vendor) if isinstance(vendor, str) else vendor
    found = list(doctor.launch_problems(facts, mpi))
    assert len(found) == bool(words) and all(word in found[0] for word in words), found
    assert doctor.launch_lines(facts, mpi) == [f"{line} {TRAIN}"] * bool(line)


def test_library_file_is_the_loaded_libmpi():
    assert pytest.importorskip("distgpt.core.comm.mpi").MPI  # loads it
    assert Path(launchers.library_file()).name.startswith("libmpi")


def test_open_mpi_requires_two_variables_for_root(monkeypatch):
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    one, other = doctor.ROOT[0]
    for environ, is_refused in (({}, True), ({one: "1"}, True), ({one: "1", other: "1"}, False)):
        assert doctor.is_refused_as_root(environ) == is_refused
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 7)
    assert not doctor.is_refused_as_root({})


@pytest.mark.parametrize("size, vendor, line", [
    ("SLURM_STEP_NUM_TASKS", "MPICH", "srun --mpi=pmi2"),
    ("SLURM_STEP_NUM_TASKS", "Open MPI", "srun --mpi=pmix"),
    ("SLURM_STEP_NUM_TASKS", "Cray MPICH", "srun --mpi=cray_shasta"),
    ("FLUX_JOB_SIZE", "MPICH", "flux run -o pmi=simple"),
    ("FLUX_JOB_SIZE", "Open MPI", "flux run -o pmi=simple,pmix"),
])  # fmt: skip
def test_lone_rank_error_shows_launch_line(size, vendor, line, monkeypatch):
    mpi = pytest.importorskip("distgpt.core.comm.mpi")
    monkeypatch.setattr(job, "start_mpi", lambda: SimpleNamespace(size=1))
    monkeypatch.setattr(mpi, "vendor", lambda: vendor)
    monkeypatch.setenv(size, "4")
    with pytest.raises(UsageError, match=f"4 processes.*mpirun of {vendor}, or {line} .distgpt help"):
        job.Launched().connect("mpi")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create a file of each kind, a possibly held lock, and the lock of a killed process."""
    place = tmp_path / "caches"
    monkeypatch.setenv(caches.CACHE, str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(disk_cache, "beside", lambda: tmp_path / "none")
    monkeypatch.setattr(disk_cache, "SITE", tmp_path / "site")
    monkeypatch.setattr(caches, "temporary_folder", lambda: tmp_path / "none")
    own, old = f"caches/{disk_cache.folder_name()}", f"caches/loops-{'0' * 16}"
    names = (f"{own}/a.loop", f"{own}/.a.loop.lock", f"{old}/b.loop", f"{old}/.b.loop.lock")
    names += ("caches/kernels/c.cubin", "caches/models/org--d.safetensors", "site/f.loops", "caches/others/g")
    names += ("caches/kernels/mine.cu", "caches/models/mine.safetensors", "none/distgpt/kernels/h.cubin")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(bytes(100))
    day = time.time() - caches.DAY
    os.utime(tmp_path / old / ".b.loop.lock", (day, day))
    os.utime(tmp_path / old / "b.loop", (day, day))
    return place


def files(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_caches_report_size_use_and_owner(place):
    result = succeeded("doctor", "--caches", "--json")
    found = {each["path"]: each for each in json.loads(result.stdout)}
    assert found[str(place.parent / "none" / "distgpt" / "kernels")]["emptied"] == ""  # not in use
    own = found[str(place / disk_cache.folder_name())]
    assert (own["size"], own["files"], own["emptied"]) == (200, 2, "compiled") and "this" in own["what"]
    old = found[str(place / f"loops-{'0' * 16}")]
    assert old["last_use"] < own["last_use"] - caches.DAY / 2 and "another" in old["what"]
    assert found[str(place / "models")]["emptied"] == "all"
    assert str(place.parent / "site") in found and not any("others" in path for path in found)
    shown = inside("doctor", "--caches").stdout
    for path in found:
        assert path in shown
    assert "200 B" in shown and "2 files" in shown


def test_empty_compiled_keeps_held_locks(place):
    result = inside("doctor", "--caches", "--empty", "compiled")
    assert result.returncode == 0 and "removed 4 files, 400 B" in result.stderr
    assert files(place) == {".a.loop.lock", "org--d.safetensors", "g", "mine.cu", "mine.safetensors"}
    assert not (place / f"loops-{'0' * 16}").exists() and files(place.parent) >= {"f.loops"}


def test_empty_all_removes_only_own_files(place, monkeypatch):
    assert inside("doctor", "--caches", "--empty", "all").returncode == 0
    assert files(place) == {".a.loop.lock", "g", "mine.cu", "mine.safetensors"}
    assert files(place.parent) - files(place) == {"f.loops", "h.cubin"}
    monkeypatch.delenv(caches.CACHE)  # empties the default directory
    before = files(place)
    assert inside("doctor", "--caches", "--empty", "all").returncode == 0
    assert files(place) == before and "h.cubin" not in files(place.parent)


def test_empty_skips_links_and_other_users(place, monkeypatch):
    (place / "kernels").rename(place.parent / "elsewhere")
    (place / "kernels").symlink_to(place.parent / "elsewhere")
    assert "removed 3 files" in inside("doctor", "--caches", "--empty", "compiled").stderr
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "removed 0 files," in inside("doctor", "--caches", "--empty", "all").stderr
    assert {"c.cubin", "org--d.safetensors"} <= files(place.parent)


def test_cache_report_creates_no_directory(place, monkeypatch):
    monkeypatch.setattr(disk_cache, "site", lambda: {"a": b""})
    monkeypatch.setattr(disk_cache, "folder", lambda: pytest.fail("it makes one"))
    assert "the site's" in inside("doctor", "--caches").stdout


def test_doctor_rejects_mixed_cache_options():
    refused(inside("doctor", "--empty", "all"), 2, "--caches")
    refused(inside("doctor", "--caches", "--stage", "mpi"), 2, "--stage")

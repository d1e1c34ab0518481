"""Launch lines: the right one for an MPI, and what the doctor says of wrong ones."""

import os
import sys
from pathlib import Path

import pytest

from distgpt.cluster.jobs import launchers
from distgpt.cluster.launch import job
from distgpt.core.base.errors import UsageError
from distgpt.measure.doctor import launches, verdicts

mpi = pytest.importorskip("distgpt.core.comm.mpi")

HYDRA, OPEN = ({"path": f"/none/{who}/mpirun", "vendor": who} for who in ("MPICH", "Open MPI"))
NOWHERE = {"path": None, "vendor": ""}


def around(mpirun, beside="", srun=(), as_root=False):
    """The facts of a process that nothing has launched."""
    what = {"mpirun": {**mpirun, "beside": beside}, "srun": list(srun)}
    return {"launcher": "", "processes": 1, **what, "as_root": as_root}


def of(vendor):
    return {"problem": "", "vendor": vendor, "library": f"/none/{vendor}/libmpi.so"}


@pytest.mark.parametrize(
    ("facts", "vendor", "words"),
    [
        (around(HYDRA), "MPICH", []),
        (around(HYDRA), "Intel MPI", []),  # both speak the PMI of Hydra
        (around(HYDRA), "Open MPI", ["/none/MPICH/mpirun belongs to MPICH", "the mpirun of Open MPI"]),
        (around(OPEN, "/own/mpirun"), "MPICH", ["belongs to Open MPI", "the mpirun of MPICH, /own/mpirun"]),
        (around(NOWHERE, "/own/mpirun"), "MPICH", ["no mpirun in PATH: /own/mpirun"]),
        (around(NOWHERE), "MPICH", ["no mpirun in PATH", "none beside /none/MPICH/libmpi.so", job.HELP]),
        (around(OPEN, as_root=True), "Open MPI", ["does not start for root", "--allow-run-as-root"]),
        (around(HYDRA, as_root=True), "MPICH", []),
        (around(OPEN, srun=["none", "pmi2"]), "Open MPI", ["has none, pmi2", "needs pmix", "by its mpirun"]),
        (around(HYDRA, srun=["none", "pmi2"]), "MPICH", []),
        (around(HYDRA, srun=["pmix"]), "Intel MPI", []),
        (around(HYDRA, srun=["pmix"]), "an unknown MPI", []),
    ],
)
def test_each_trap_is_one_line_with_what_to_type(facts, vendor, words):
    found = list(launches.traps(facts, of(vendor)))
    assert len(found) == bool(words) and all(word in found[0] for word in words), found


def test_an_mpirun_of_the_same_kind_from_elsewhere_is_a_doubt(tmp_path):
    other, same = tmp_path / "mpirun", tmp_path / "mpiexec"
    other.touch()
    same.symlink_to(other)
    for beside, is_other in ((sys.executable, True), (str(other), False), (str(same), False)):
        facts = around({"path": str(other), "vendor": "Open MPI"}, beside)
        said = list(launches.traps(facts, of("Open MPI")))
        assert [f"{beside} is sure to fit" in line for line in said] == [True] * is_other


def test_nothing_is_said_of_a_launch_where_mpi_does_not_start_or_a_launcher_is_at_work():
    broken = {"problem": "it does not start"}
    for launched, found in (
        (around(OPEN, srun=["none"]), broken),
        ({"launcher": "srun", "processes": 2}, of("Open MPI")),
    ):
        assert [*launches.traps(launched, found), *launches.lines(launched, found)] == []


def test_the_lines_are_those_that_fit():
    train = "-n 2 distgpt train --stage mpi"
    more = "  # more ranks than cores: --oversubscribe"
    for facts, vendor, expected in (
        (around(HYDRA), "MPICH", [f"/none/MPICH/mpirun {train}"]),
        (around(OPEN, "/own/mpirun"), "MPICH", [f"/own/mpirun {train}"]),
        (around(OPEN), "MPICH", []),
        (
            around(HYDRA, srun=["pmix", "pmi2"]),
            "MPICH",
            [f"srun --mpi=pmi2 {train}", f"/none/MPICH/mpirun {train}"],
        ),
        (
            around(HYDRA, srun=["pmix"]),
            "Intel MPI",
            [f"srun --mpi=pmix {train}", f"/none/MPICH/mpirun {train}"],
        ),
        (around(NOWHERE, srun=["cray_shasta"]), "Cray MPICH", [f"srun --mpi=cray_shasta {train}"]),
        (
            around(OPEN, as_root=True),
            "Open MPI",
            [f"/none/Open MPI/mpirun --allow-run-as-root {train}{more}"],
        ),
        (around(OPEN), "Open MPI", [f"/none/Open MPI/mpirun {train}{more}"]),
        ({**around(NOWHERE), "flux": True}, "MPICH", [f"flux run -o pmi=simple {train}"]),
        ({**around(NOWHERE), "flux": True}, "Open MPI", [f"flux run -o pmi=simple,pmix {train}"]),
    ):
        assert launches.lines(facts, of(vendor)) == expected, (facts, vendor)


def test_warnings_have_them(monkeypatch):
    monkeypatch.setattr(verdicts, "_differences", lambda ranks: ())
    monkeypatch.setattr(verdicts, "hosts", lambda ranks: ())
    for others in ("_shared_gpus", "_not_kept", "_unused_loops", "_settings"):
        monkeypatch.setattr(verdicts, others, lambda ranks: ())
    (said,) = verdicts.warnings(around(HYDRA), of("Open MPI"), [])
    assert "belongs to MPICH" in said


# What they stand on


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_mpirun_beside_a_library_is_found(tmp_path):
    """Debian has both MPIs in one folder."""
    executable(tmp_path / "bin" / "mpirun", "echo HYDRA build details:")
    for folder in ("lib", "lib/release", "lib/x86_64-linux-gnu"):
        library = str(tmp_path / folder / "libmpi.so")
        assert launchers.mpirun_beside(library, "Intel MPI") == str(tmp_path / "bin" / "mpirun"), folder
        assert launchers.mpirun_beside(library, "Open MPI") == ""
    executable(tmp_path / "bin" / "mpirun.openmpi", "echo 'mpirun (Open MPI) 4.1.4'")
    library = str(tmp_path / "lib" / "libmpi.so.40")
    assert launchers.mpirun_beside(library, "Open MPI") == str(tmp_path / "bin" / "mpirun.openmpi")
    assert launchers.mpirun_beside("", "MPICH") == ""


def test_srun_is_asked_for_what_it_offers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for text, ways in (
        # Slurm 22.05, and one that writes its name on standard error, before 21.
        (
            r"printf ' MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin: pmix_v4\n'",
            ["pmix", "none", "pmi2"],
        ),
        (r"printf 'srun: MPI types are...\nsrun: none\nsrun: pmi2\n' >&2", ["none", "pmi2"]),
        (r"printf 'srun: error: no configuration\nsrun: fatal\n' >&2; exit 1", []),
    ):
        executable(tmp_path / "srun", text)
        assert launchers.srun_ways() == ways
    monkeypatch.setattr(launchers.shutil, "which", lambda name: None)
    assert launchers.srun_ways() == []


def test_the_file_of_the_library_is_the_one_in_use():
    assert mpi.MPI  # loads it
    assert Path(launchers.library_file()).name.startswith("libmpi")


def test_open_mpi_may_be_asked_to_start_for_root(monkeypatch):
    monkeypatch.setattr(launches.os, "geteuid", lambda: 0)
    one, other = launches.ROOT[0]
    for environ, refused in (({}, True), ({one: "1"}, True), ({one: "1", other: "1"}, False)):
        assert launches.is_refused_as_root(environ) == refused
    monkeypatch.setattr(launches.os, "geteuid", lambda: 7)
    assert not launches.is_refused_as_root({})


# Under a launcher


def test_ranks_that_find_themselves_alone_are_told_the_line_for_their_mpi(monkeypatch):
    class Alone:
        size = 1

    monkeypatch.setattr(job, "start_mpi", Alone)
    for size, vendor, line in (
        ("SLURM_STEP_NUM_TASKS", "MPICH", "srun --mpi=pmi2"),
        ("SLURM_STEP_NUM_TASKS", "Open MPI", "srun --mpi=pmix"),
        ("SLURM_STEP_NUM_TASKS", "Cray MPICH", "srun --mpi=cray_shasta"),
        ("FLUX_JOB_SIZE", "MPICH", "flux run -o pmi=simple"),
        ("FLUX_JOB_SIZE", "Open MPI", "flux run -o pmi=simple,pmix"),
    ):
        monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
        monkeypatch.setenv(size, "4")
        monkeypatch.setattr(mpi, "vendor", lambda vendor=vendor: vendor)
        with pytest.raises(UsageError, match=f"4 processes.*mpirun of {vendor}, or {line} .distgpt help"):
            job.Launched().connect("mpi")

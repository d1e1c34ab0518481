"""Launch lines: the right one for an MPI, and what the doctor says of wrong ones."""

from pathlib import Path

import pytest
from distgpt.cluster.jobs import launchers
from distgpt.cluster.launch import job
from distgpt.core.base.errors import UsageError
from distgpt.measure.doctor import report

mpi = pytest.importorskip("distgpt.core.comm.mpi")

HYDRA, OPEN = ({"path": f"/none/{who}/mpirun", "vendor": who} for who in ("MPICH", "Open MPI"))
NOWHERE = {"path": None, "vendor": ""}
TRAIN = "-n 2 distgpt train --stage mpi"


def around(mpirun, as_root=False):
    """The facts of a process that nothing has launched."""
    return {"launcher": "", "processes": 1, "mpirun": mpirun, "as_root": as_root}


def of(vendor):
    return {"problem": "", "vendor": vendor, "library": f"/none/{vendor}/libmpi.so"}


@pytest.mark.parametrize(
    ("facts", "vendor", "words", "lines"),
    [
        (around(HYDRA), "MPICH", [], ["/none/MPICH/mpirun"]),
        (around(HYDRA), "Intel MPI", [], ["/none/MPICH/mpirun"]),  # both speak the PMI of Hydra
        (around(HYDRA), "Open MPI", ["mpirun belongs to MPICH", "the mpirun of Open MPI"], []),
        (around(OPEN), "MPICH", ["belongs to Open MPI", "the mpirun of MPICH"], []),
        (around(NOWHERE), "MPICH", ["no mpirun in PATH", job.HELP], []),
        (
            around(OPEN, as_root=True),
            "Open MPI",
            ["does not start for root", "--allow-run-as-root"],
            ["/none/Open MPI/mpirun --allow-run-as-root"],
        ),
        (around(HYDRA, as_root=True), "MPICH", [], ["/none/MPICH/mpirun"]),
        (around(HYDRA), "an unknown MPI", [], []),
    ],
)
def test_launch_lines_fit_the_mpi_and_traps_are_named(facts, vendor, words, lines):
    found = list(report._launch(facts, of(vendor)))
    assert len(found) == bool(words) and all(word in found[0] for word in words), found
    assert report.launch_lines(facts, of(vendor)) == [f"{line} {TRAIN}" for line in lines]


def test_a_broken_mpi_or_a_launcher_at_work_has_no_launch_lines():
    for launched, found in (
        (around(OPEN), {"problem": "it does not start"}),
        ({"launcher": "srun", "processes": 2}, of("Open MPI")),
    ):
        assert [*report._launch(launched, found), *report.launch_lines(launched, found)] == []


# What they stand on


def test_the_file_of_the_library_is_the_one_in_use():
    assert mpi.MPI  # loads it
    assert Path(launchers.library_file()).name.startswith("libmpi")


def test_open_mpi_may_be_asked_to_start_for_root(monkeypatch):
    monkeypatch.setattr(report.os, "geteuid", lambda: 0)
    one, other = report.ROOT[0]
    for environ, refused in (({}, True), ({one: "1"}, True), ({one: "1", other: "1"}, False)):
        assert report.is_refused_as_root(environ) == refused
    monkeypatch.setattr(report.os, "geteuid", lambda: 7)
    assert not report.is_refused_as_root({})


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

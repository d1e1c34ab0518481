"""Memory and cores as the system limits them: control groups of both versions, ulimit, what Slurm says."""

import os
import re
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from distgpt.cluster.launch.environment import BatchGrants
from distgpt.core.comm.resources import (
    Cores,
    Grants,
    Groups,
    available_memory,
    granted_cores,
    granted_memory,
    status_bytes,
    usable_cores,
)

from conftest import SMALL, clean_environment, distgpt, inside, needs_mpi, refused

MIB, GIB = 1 << 20, 1 << 30
LARGE = [*SMALL, "--n-embd", "1024", "--n-layer", "12"]  # about 600 MiB
CONTROLLERS = Path("/sys/fs/cgroup")
NOWHERE = Groups(Path("/nowhere"), Path("/nowhere"))


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Groups(folder / "cgroup", folder / "own")


# Control groups, as recorded


def test_a_group_of_version_2_and_all_above_it_limit_memory_by_what_they_have_free(tmp_path):
    stat = f"anon 5\nfile 9\nactive_file {100 * MIB}\ninactive_file {50 * MIB}"
    files = {
        "own": "0::/job/step",
        "cgroup/job/memory.max": 800 * MIB,
        "cgroup/job/memory.current": 500 * MIB,
        "cgroup/job/memory.stat": stat,
        "cgroup/job/step/memory.max": "max",
        "cgroup/job/step/memory.high": "max",
        "cgroup/job/step/memory.current": 400 * MIB,
    }
    found = granted_memory(1, written(tmp_path, files), Grants())
    assert (found.free, found.total) == (450 * MIB, 800 * MIB)  # caches of files give way
    assert found.where == "this machine, limited to 800 MiB by memory.max of the control group /job"
    both = granted_memory(2, written(tmp_path, files), Grants())
    assert both.free == 225 * MIB and "for each of 2 ranks" in both.where
    slow = granted_memory(1, written(tmp_path, {"cgroup/job/step/memory.high": 600 * MIB}), Grants())
    assert slow.free == 200 * MIB and slow.limit == "memory.high of the control group /job/step"
    full = granted_memory(1, written(tmp_path, {"cgroup/job/memory.max": 100 * MIB}), Grants())
    assert full.free == 0


def test_a_group_of_version_1_counts_with_all_its_groups_below(tmp_path):
    files = {
        "own": "9:cpuset:/\n4:memory:/slurm/job_1\n0::/user.slice",
        "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "cgroup/memory/memory.usage_in_bytes": 3 * GIB,
        "cgroup/memory/slurm/memory.limit_in_bytes": 700 * MIB,
        "cgroup/memory/slurm/memory.usage_in_bytes": 300 * MIB,
        "cgroup/memory/slurm/memory.stat": f"inactive_file 0\ntotal_inactive_file {100 * MIB}",
        "cgroup/memory/slurm/memory.soft_limit_in_bytes": 1 * MIB,
        "cgroup/memory/slurm/job_1/memory.limit_in_bytes": 600 * MIB,
        "cgroup/memory/slurm/job_1/memory.usage_in_bytes": 50 * MIB,
    }
    groups = written(tmp_path, files)
    found = granted_memory(1, groups, Grants())
    assert (found.free, found.limit) == (500 * MIB, "memory.limit_in_bytes of the control group /slurm")
    # In a container the path is that of the host, and its own group is the root.
    inside = {"own": "4:memory:/docker/1", "cgroup/memory/memory.limit_in_bytes": 4 * GIB}
    found = granted_memory(1, written(tmp_path, inside), Grants())
    assert (found.free, found.limit) == (1 * GIB, "memory.limit_in_bytes of the control group /")


def test_without_a_limit_there_is_what_the_machine_has():
    found = granted_memory(2, NOWHERE, Grants())
    assert found.limit == "" and found.where == "this machine for each of 2 ranks"
    assert found.free == pytest.approx(available_memory() / 2, rel=0.1)
    assert granted_cores(3.5, 2, NOWHERE, Grants()) == Cores(3.5)
    assert granted_cores(0.0, 1, NOWHERE, Grants()).number == len(usable_cores())


def test_quotas_of_cores_are_shared_by_the_ranks_of_a_host(tmp_path):
    for files, number, whole, limit in (
        ({"own": "0::/a/b", "cgroup/a/b/cpu.max": "max 100000"}, 16, 16, ""),
        ({"cgroup/a/cpu.max": "150000 100000"}, 1.5, 1, "cpu.max of the control group /a"),
        ({"cgroup/a/b/cpu.max": "50000 100000"}, 0.5, 1, "cpu.max of the control group /a/b"),
    ):
        found = granted_cores(16, 1, written(tmp_path, files), Grants())
        assert (found.number, found.whole, found.limit) == (number, whole, limit)
    old = {"own": "2:cpu,cpuacct:/x/y", "cgroup/cpu/x/y/cpu.cfs_quota_us": -1}
    old |= {"cgroup/cpu/x/y/cpu.cfs_period_us": 100000, "cgroup/cpu/x/cpu.cfs_period_us": 50000}
    groups = written(tmp_path, {**old, "cgroup/cpu/x/cpu.cfs_quota_us": 400000})
    assert granted_cores(16, 1, groups, Grants()).limit == "cpu.cfs_quota_us of the control group /x"
    assert [granted_cores(16, ranks, groups, Grants()).number for ranks in (1, 2, 3)] == [8, 4, 8 / 3]
    task = {"SLURM_STEP_NUM_TASKS": "1"}
    asked = granted_cores(16, 1, groups, BatchGrants({"SLURM_CPUS_PER_TASK": "6", **task}))
    assert asked == Cores(6.0, "SLURM_CPUS_PER_TASK=6")
    batch = granted_cores(16, 1, NOWHERE, BatchGrants({"SLURM_CPUS_PER_TASK": "1"}))  # no task but a script
    assert batch.number == 16
    for nonsense in ("", "0", "many", "-1"):
        grants = BatchGrants({"SLURM_CPUS_PER_TASK": nonsense, **task})
        assert granted_cores(16, 1, NOWHERE, grants).number == 16


def test_batch_systems_that_bind_no_process_still_grant_cores():
    """PBS tells of one process or of a chunk, LSF and Grid Engine of all that run on a host."""
    pbs = {"PBS_JOBID": "7.server", "NCPUS": "4"}
    lsf = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 6 "}
    grid_engine = {"SGE_TASK_ID": "undefined", "JOB_ID": "7", "NSLOTS": "6", "NHOSTS": "1"}
    for environ, ranks, number, limit in (
        (pbs, 1, 4, "NCPUS=4"),
        (pbs, 2, 2, "NCPUS=4"),
        ({**pbs, "OMP_NUM_THREADS": "4"}, 2, 4, "NCPUS=4"),  # ompthreads: of each
        ({**pbs, "OMP_NUM_THREADS": "2"}, 1, 4, "NCPUS=4"),  # exported by the job's script
        (lsf, 1, 6, "LSB_MCPU_HOSTS=n1 6"),
        (lsf, 2, 3, "LSB_MCPU_HOSTS=n1 6"),
        (grid_engine, 1, 6, "NSLOTS=6"),
        (grid_engine, 4, 1.5, "NSLOTS=6"),
        # Where a number may mean something else, or is none of a job's.
        ({"NCPUS": "4"}, 1, 16, ""),
        ({**pbs, "PBS_JOBID": ""}, 1, 16, ""),
        ({**pbs, "NCPUS": "0"}, 1, 16, ""),
        ({**lsf, "LSB_MCPU_HOSTS": "n1 3 n2 3"}, 1, 16, ""),
        ({**lsf, "LSB_AFFINITY_HOSTFILE": "/job/hosts"}, 1, 16, ""),
        ({"NSLOTS": "6", "NHOSTS": "1"}, 1, 16, ""),
        ({**grid_engine, "NHOSTS": "2"}, 1, 16, ""),
    ):
        assert granted_cores(16, ranks, NOWHERE, BatchGrants(environ)) == Cores(number, limit), environ
    assert granted_cores(2, 1, NOWHERE, BatchGrants(pbs)) == Cores(2)  # its affinity is smaller


def test_what_slurm_was_asked_for_is_a_limit_for_all_ranks_of_a_node():
    for environ, total, limit in (
        ({"SLURM_MEM_PER_NODE": "3000"}, 3000, "SLURM_MEM_PER_NODE=3000"),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 2000, "SLURM_MEM_PER_CPU=500 × SLURM_CPUS_ON_NODE=4"),
    ):
        for ranks in (1, 2):
            found = granted_memory(ranks, NOWHERE, BatchGrants(environ))
            assert (found.total, found.limit) == (total * MIB, limit)
            mine = status_bytes("VmRSS")
            assert found.free == pytest.approx(max(0, total * MIB // ranks - mine), abs=64 * MIB)
    for nothing in ({"SLURM_MEM_PER_NODE": "0"}, {"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "x"}):
        assert granted_memory(1, NOWHERE, BatchGrants(nothing)).limit == ""


# Runs under real limits: each says before its first step that it does not fit


@contextmanager
def group(controller, **values):
    """A new control group of version 1 with these values: its folder."""
    parent = CONTROLLERS / controller
    if os.geteuid() or not (parent / "cgroup.procs").is_file():
        pytest.skip("needs root and control groups of version 1")
    place = parent / f"distgpt-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made here: {error}")
    try:
        for name, value in values.items():
            (place / f"{controller}.{name}").write_text(str(value))
        yield place
    finally:
        place.rmdir()


def limited(words, *groups, **ulimits):
    """Run distgpt under these limits."""

    def enter():
        for place in groups:
            (place / "cgroup.procs").write_text(str(os.getpid()))
        for name, value in ulimits.items():
            resource.setrlimit(getattr(resource, name), (value, value))

    program = [sys.executable, "-m", "distgpt", *map(str, words)]
    how = {"capture_output": True, "text": True, "timeout": 100, "env": clean_environment()}
    return subprocess.run(program, preexec_fn=enter, **how)


@pytest.mark.slow
def test_a_run_that_does_not_fit_into_its_group_says_so_and_names_the_group(tmp_path):
    with group("memory", limit_in_bytes=500 * MIB) as place:
        result = limited(["train", *LARGE, "--out", tmp_path / "run"], place)
        named = f"limited to 500 MiB by memory.limit_in_bytes of the control group /{place.name}"
        refused(result, 2, "this run needs", named, "help out-of-memory")
        fits = limited(["train", *SMALL, "--steps", "2", "--out", tmp_path / "small"], place)
        assert fits.returncode == 0, fits.stderr
        page = limited(["estimate", *LARGE, "--no-measure"], place)
        assert named in page.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_does_not_fit_under_ulimit_says_so(tmp_path):
    for flag, name in (("v", "RLIMIT_AS"), ("d", "RLIMIT_DATA")):
        result = limited(["train", *LARGE, "--out", tmp_path / "run"], **{name: 1100 * MIB})
        refused(result, 2, "this run needs", f"by ulimit -{flag}")
        fits = limited(["train", *SMALL, "--steps", "2", "--out", tmp_path / name], **{name: 1100 * MIB})
        assert fits.returncode == 0, fits.stderr


def test_a_run_that_slurm_has_no_memory_for_says_so(tmp_path):
    words = ["train", *LARGE, "--out", "run"]
    for variables in ({"SLURM_MEM_PER_NODE": "400"}, {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}):
        refused(inside(*words, cwd=tmp_path, env=variables), 2, "this run needs", *variables)


# Threads


def noted(result):
    assert result.returncode == 0, result.stderr
    return [line for line in (result.stdout + result.stderr).splitlines() if re.search(r"\b(core|CPU)s?\b", line)]


def test_more_threads_than_cores_are_noted_before_the_first_step(tmp_path):
    words = ["train", *SMALL, "--steps", "1", "--out"]
    many = len(usable_cores()) + 1
    assert noted(inside(*words, tmp_path / "a")) == []
    (line,) = noted(inside(*words, tmp_path / "b", "--threads", str(many)))
    assert line.startswith(f"--threads {many} is more than the CPUs of a rank, {len(usable_cores())}")
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_STEP_NUM_TASKS": "1"}
    if len(usable_cores()) > 1:
        (line,) = noted(inside(*words, tmp_path / "c", "--threads", "2", env=slurm))
        assert line.startswith("--threads 2 is more than the CPUs of a rank, 1") and "SLURM_CPUS_PER_TASK=1" in line


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_ranks_with_more_threads_than_cores_are_noted_once(tmp_path):
    many = len(usable_cores()) + 1
    words = ["train", *SMALL, "--stage", "mpi", "--steps", "1", "--out", tmp_path / "run"]
    words += ["--threads", str(many)]
    (line,) = noted(distgpt(*words, ranks=2))
    if len(usable_cores()) > 1:
        assert line.startswith(f"--threads {many} is more")


def test_weights_that_memory_is_too_small_for_are_refused_before_they_are_read(trained):
    words = ["infer", "--weights", trained, "--max-new-tokens", "1", "--dtype", "float32"]
    result = inside(*words, env={"SLURM_MEM_PER_NODE": "1"})
    refused(result, 2, "needs", "limited to 1 MiB by SLURM_MEM_PER_NODE=1", "--dtype")

"""Memory and cores as the system limits them: control groups of both versions, ulimit, what Slurm says."""

import re
import resource
import subprocess
import sys
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

from conftest import SMALL, clean_environment, inside, refused

MIB, GIB = 1 << 20, 1 << 30
LARGE = [*SMALL, "--n-embd", "1024", "--n-layer", "12"]  # about 600 MiB
NOWHERE = Groups(Path("/nowhere"), Path("/nowhere"))


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Groups(folder / "cgroup", folder / "own")


# Control groups, as recorded


def test_groups_of_version_2_limit_memory_by_their_smallest_free_amount(tmp_path):
    files = {
        "own": "0::/job/step",
        "cgroup/job/memory.max": 800 * MIB,
        "cgroup/job/memory.current": 500 * MIB,
        "cgroup/job/memory.stat": f"anon 5\nfile 9\nactive_file {100 * MIB}\ninactive_file {50 * MIB}",
        "cgroup/job/step/memory.max": "max",
        "cgroup/job/step/memory.high": "max",
        "cgroup/job/step/memory.current": 400 * MIB,
    }
    of_job, of_step = "memory.max of the control group /job", "memory.high of the control group /job/step"
    for changed, ranks, free, limit in (
        ({}, 1, 450, of_job),  # caches of files give way
        ({}, 2, 225, of_job),
        ({"cgroup/job/step/memory.high": 600 * MIB}, 1, 200, of_step),
        ({"cgroup/job/memory.max": 100 * MIB}, 1, 0, of_job),
    ):
        found = granted_memory(ranks, written(tmp_path, files | changed), Grants())
        assert (found.free, found.limit) == (free * MIB, limit), (changed, ranks)
    found = granted_memory(2, written(tmp_path, files), Grants())
    assert found.where == f"this machine for each of 2 ranks, limited to 800 MiB by {of_job}"


def test_groups_of_version_1_include_the_groups_below_them(tmp_path):
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
    # In a container the path is the host's, and its own group is the root.
    container = {"own": "4:memory:/docker/1", "cgroup/memory/memory.limit_in_bytes": 4 * GIB}
    for changed, free, group in (({}, 500 * MIB, "/slurm"), (container, GIB, "/")):
        found = granted_memory(1, written(tmp_path, files | changed), Grants())
        assert (found.free, found.limit) == (free, f"memory.limit_in_bytes of the control group {group}")


def test_without_a_limit_a_rank_has_its_share_of_the_machine():
    found = granted_memory(2, NOWHERE, Grants())
    assert found.limit == "" and found.where == "this machine for each of 2 ranks"
    assert found.free == pytest.approx(available_memory() / 2, rel=0.1)
    assert granted_cores(3.5, 2, NOWHERE, Grants()) == Cores(3.5)
    assert granted_cores(0.0, 1, NOWHERE, Grants()).number == len(usable_cores())


def test_ranks_of_a_host_share_quotas_of_cores(tmp_path):
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
    of_x = "cpu.cfs_quota_us of the control group /x"
    assert [granted_cores(16, n, groups, Grants()) for n in (1, 2)] == [Cores(8, of_x), Cores(4, of_x)]
    asked = granted_cores(16, 1, groups, BatchGrants({"SLURM_CPUS_PER_TASK": "6", **TASK}))
    assert asked == Cores(6.0, "SLURM_CPUS_PER_TASK=6")


TASK = {"SLURM_STEP_NUM_TASKS": "1"}
PBS = {"PBS_JOBID": "7.server", "NCPUS": "4"}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 6 "}
GRID_ENGINE = {"SGE_TASK_ID": "undefined", "JOB_ID": "7", "NSLOTS": "6", "NHOSTS": "1"}


@pytest.mark.parametrize(
    ("environ", "ranks", "number", "limit"),
    [
        (PBS, 1, 4, "NCPUS=4"),
        (PBS, 2, 2, "NCPUS=4"),
        ({**PBS, "OMP_NUM_THREADS": "4"}, 2, 4, "NCPUS=4"),  # ompthreads: of each
        ({**PBS, "OMP_NUM_THREADS": "2"}, 1, 4, "NCPUS=4"),  # exported by the job's script
        (LSF, 1, 6, "LSB_MCPU_HOSTS=n1 6"),
        (LSF, 2, 3, "LSB_MCPU_HOSTS=n1 6"),
        (GRID_ENGINE, 1, 6, "NSLOTS=6"),
        (GRID_ENGINE, 4, 1.5, "NSLOTS=6"),
        # The number may mean something else, or belongs to no job.
        ({"NCPUS": "4"}, 1, 16, ""),
        ({**PBS, "PBS_JOBID": ""}, 1, 16, ""),
        ({**PBS, "NCPUS": "0"}, 1, 16, ""),
        ({**LSF, "LSB_MCPU_HOSTS": "n1 3 n2 3"}, 1, 16, ""),
        ({**LSF, "LSB_AFFINITY_HOSTFILE": "/job/hosts"}, 1, 16, ""),
        ({"NSLOTS": "6", "NHOSTS": "1"}, 1, 16, ""),
        ({**GRID_ENGINE, "NHOSTS": "2"}, 1, 16, ""),
        ({"SLURM_CPUS_PER_TASK": "1"}, 1, 16, ""),  # a script, no task
        *(({"SLURM_CPUS_PER_TASK": nonsense, **TASK}, 1, 16, "") for nonsense in ("", "0", "many", "-1")),
    ],
)
def test_batch_systems_that_bind_no_process_still_grant_cores(environ, ranks, number, limit):
    """PBS tells the cores of one process or of a chunk, LSF and Grid Engine those of all on a host."""
    assert granted_cores(16, ranks, NOWHERE, BatchGrants(environ)) == Cores(number, limit)
    assert granted_cores(0.5, 1, NOWHERE, BatchGrants(environ)) == Cores(0.5)  # a smaller affinity


def test_slurm_s_memory_is_a_limit_for_all_ranks_of_a_node():
    for environ, total, limit in (
        ({"SLURM_MEM_PER_NODE": "3000"}, 3000, "SLURM_MEM_PER_NODE=3000"),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 2000, "SLURM_MEM_PER_CPU=500 × SLURM_CPUS_ON_NODE=4"),
    ):
        for ranks in (1, 2):
            found = granted_memory(ranks, NOWHERE, BatchGrants(environ))
            assert (found.total, found.limit) == (total * MIB, limit)
            left = max(0, total * MIB // ranks - status_bytes("VmRSS"))
            assert found.free == pytest.approx(left, abs=64 * MIB)
    for nothing in ({"SLURM_MEM_PER_NODE": "0"}, {"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "x"}):
        assert granted_memory(1, NOWHERE, BatchGrants(nothing)).limit == ""


# Runs that do not fit


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "flag"), [("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")])
def test_a_run_that_does_not_fit_under_ulimit_names_it(limit, flag, tmp_path):
    def limited(*words):
        program = [sys.executable, "-m", "distgpt", *map(str, words)]
        how = {"capture_output": True, "text": True, "timeout": 100, "env": clean_environment()}
        bytes_ = (1100 * MIB, 1100 * MIB)
        return subprocess.run(program, preexec_fn=lambda: resource.setrlimit(getattr(resource, limit), bytes_), **how)

    result = limited("train", *LARGE, "--out", tmp_path / "run")
    refused(result, 2, "this run requires", f"by ulimit -{flag}", "help out-of-memory")
    fits = limited("train", *SMALL, "--steps", "2", "--out", tmp_path / "small")
    assert fits.returncode == 0 and not (tmp_path / "run").exists(), fits.stderr


def test_a_run_that_slurm_has_no_memory_for_is_refused(trained, tmp_path):
    words = ["train", *LARGE, "--out", "run"]
    for variables in ({"SLURM_MEM_PER_NODE": "400"}, {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}):
        refused(inside(*words, cwd=tmp_path, env=variables), 2, "this run requires", *variables)
    result = inside("infer", "--weights", trained, "--dtype", "float32", env={"SLURM_MEM_PER_NODE": "1"})
    refused(result, 2, "limited to 1 MiB by SLURM_MEM_PER_NODE=1", "--dtype")  # before it is read


def test_more_threads_than_cores_are_noted_before_the_first_step(tmp_path):
    words = ["train", *SMALL, "--steps", "1", "--out"]
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_STEP_NUM_TASKS": "1"}
    for name, more, noted in (("a", [], 0), ("b", ["--threads", "2"], 1)):
        result = inside(*words, tmp_path / name, *more, env=slurm)
        assert result.returncode == 0, result.stderr
        begun = result.stdout.partition("step 1/")[0]
        assert len(re.findall(r"^--threads 2 ", begun, re.MULTILINE)) == noted

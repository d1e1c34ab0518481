"""Limits of memory and cores: control groups of both versions, ulimit and Slurm."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from distgpt.cluster.launch.environment import BatchGrants
from distgpt.core.comm import resources
from distgpt.core.comm.affinity import Affinity

from conftest import SMALL, clean_environment, inside, refused, succeeded

MIB, GIB = 1 << 20, 1 << 30
LARGE = [*SMALL, "--n-embd", "1024", "--n-layer", "12"]  # about 600 MiB
NOWHERE = resources.Groups(Path("/nowhere"), Path("/nowhere"))


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return resources.Groups(folder / "cgroup", folder / "own")


def test_cgroup_v2_limits_memory(tmp_path):
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
        found = resources.granted_memory(ranks, written(tmp_path, files | changed), resources.Grants())
        assert (found.free, found.limit) == (free * MIB, limit), (changed, ranks)
    found = resources.granted_memory(2, written(tmp_path, files), resources.Grants())
    assert found.where == f"this machine for each of 2 ranks, limited to 800 MiB by {of_job}"


def test_cgroup_v1_limits_memory(tmp_path):
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
    # A container sees the host's path, and its group as the root.
    container = {"own": "4:memory:/docker/1", "cgroup/memory/memory.limit_in_bytes": 4 * GIB}
    for changed, free, group in (({}, 500 * MIB, "/slurm"), (container, GIB, "/")):
        found = resources.granted_memory(1, written(tmp_path, files | changed), resources.Grants())
        assert (found.free, found.limit) == (free, f"memory.limit_in_bytes of the control group {group}")


def test_groups_of_other_controllers_do_not_limit(tmp_path):
    files = {"own": "9:cpuset:/\n4:memory:/job", "cgroup/memory/memory.limit_in_bytes": 1 * MIB}
    assert [*written(tmp_path, files).chain("cpu")] == []


def test_peak_memory_counts_bytes_of_kibibytes(monkeypatch):
    assert resources.peak_memory() == resources.status_bytes("VmHWM") > 30 * MIB
    monkeypatch.setattr(resources, "status_bytes", lambda name: 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert before << 10 <= resources.peak_memory() < 2 * before << 10


def test_default_affinity_binds_nothing():
    none = resources.Grants()
    with Affinity().unbound():
        assert Affinity().share(6, 2, none) == resources.granted_cores(6.0, 2, grants=none).whole


def test_unlimited_ranks_share_the_machine():
    found = resources.granted_memory(2, NOWHERE, resources.Grants())
    assert found.limit == "" and found.where == "this machine for each of 2 ranks"
    assert found.free == pytest.approx(resources.available_memory() / 2, rel=0.1)
    assert resources.granted_cores(3.5, 2, NOWHERE, resources.Grants()) == resources.Cores(3.5)
    assert resources.granted_cores(0.0, 1, NOWHERE, resources.Grants()).number == len(resources.usable_cores())


def test_ranks_share_core_quotas(tmp_path):
    for files, number, whole, limit in (
        ({"own": "0::/a/b", "cgroup/a/b/cpu.max": "max 100000"}, 16, 16, ""),
        ({"cgroup/a/cpu.max": "150000 100000"}, 1.5, 1, "cpu.max of the control group /a"),
        ({"cgroup/a/b/cpu.max": "50000 100000"}, 0.5, 1, "cpu.max of the control group /a/b"),
    ):
        found = resources.granted_cores(16, 1, written(tmp_path, files), resources.Grants())
        assert (found.number, found.whole, found.limit) == (number, whole, limit)
    old = {"own": "2:cpu,cpuacct:/x/y", "cgroup/cpu/x/y/cpu.cfs_quota_us": -1}
    old |= {"cgroup/cpu/x/y/cpu.cfs_period_us": 100000, "cgroup/cpu/x/cpu.cfs_period_us": 50000}
    groups = written(tmp_path, {**old, "cgroup/cpu/x/cpu.cfs_quota_us": 400000})
    of_x = "cpu.cfs_quota_us of the control group /x"
    assert [resources.granted_cores(16, n, groups, resources.Grants()) for n in (1, 2)] == [
        resources.Cores(8, of_x),
        resources.Cores(4, of_x),
    ]
    asked = resources.granted_cores(16, 1, groups, BatchGrants({"SLURM_CPUS_PER_TASK": "6", **TASK}))
    assert asked == resources.Cores(6.0, "SLURM_CPUS_PER_TASK=6")


TASK = {"SLURM_STEP_NUM_TASKS": "1"}
PBS = {"PBS_JOBID": "7.server", "NCPUS": "4"}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 6 "}
GRID_ENGINE = {"SGE_TASK_ID": "undefined", "JOB_ID": "7", "NSLOTS": "6", "NHOSTS": "1"}


@pytest.mark.parametrize(("environ", "ranks", "number", "limit"), [
    (PBS, 1, 4, "NCPUS=4"),
    (PBS, 2, 2, "NCPUS=4"),
    ({**PBS, "OMP_NUM_THREADS": "4"}, 2, 4, "NCPUS=4"),  # cores per process
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
])  # fmt: skip
def test_batch_variables_grant_cores(environ, ranks, number, limit):
    """PBS counts the cores of a process or chunk, LSF and Grid Engine the cores of a host."""
    assert resources.granted_cores(16, ranks, NOWHERE, BatchGrants(environ)) == resources.Cores(number, limit)
    assert resources.granted_cores(0.5, 1, NOWHERE, BatchGrants(environ)) == resources.Cores(0.5)  # a smaller affinity


def test_slurm_memory_limits_ranks_of_a_node():
    for environ, total, limit in (
        ({"SLURM_MEM_PER_NODE": "3000"}, 3000, "SLURM_MEM_PER_NODE=3000"),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 2000, "SLURM_MEM_PER_CPU=500 × SLURM_CPUS_ON_NODE=4"),
    ):
        for ranks in (1, 2):
            found = resources.granted_memory(ranks, NOWHERE, BatchGrants(environ))
            assert (found.total, found.limit) == (total * MIB, limit)
            left = max(0, total * MIB // ranks - resources.status_bytes("VmRSS"))
            assert found.free == pytest.approx(left, abs=64 * MIB)
    for nothing in ({"SLURM_MEM_PER_NODE": "0"}, {"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "x"}):
        assert resources.granted_memory(1, NOWHERE, BatchGrants(nothing)).limit == ""


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "flag"), [("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")])
def test_run_beyond_ulimit_names_it(limit, flag, tmp_path):
    def limited(*words):
        program = [sys.executable, "-m", "distgpt", *map(str, words)]
        how = {"capture_output": True, "text": True, "timeout": 100, "env": clean_environment()}
        bytes_ = (1100 * MIB, 1100 * MIB)
        return subprocess.run(program, preexec_fn=lambda: resource.setrlimit(getattr(resource, limit), bytes_), **how)

    result = limited("train", *LARGE, "--out", tmp_path / "run")
    refused(result, 2, "this run requires", f"by ulimit -{flag}", "help out-of-memory")
    fits = limited("train", *SMALL, "--steps", "2", "--out", tmp_path / "small")
    assert fits.returncode == 0 and not (tmp_path / "run").exists(), fits.stderr


def test_run_beyond_slurm_memory_is_rejected(trained, tmp_path):
    words = ["train", *LARGE, "--out", "run"]
    for variables in ({"SLURM_MEM_PER_NODE": "400"}, {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}):
        refused(inside(*words, cwd=tmp_path, env=variables), 2, "this run requires", *variables)
    result = inside("infer", "--weights", trained, "--dtype", "float32", env={"SLURM_MEM_PER_NODE": "1"})
    refused(result, 2, "limited to 1 MiB by SLURM_MEM_PER_NODE=1", "--dtype")  # before it is read


def test_excess_threads_are_noted_before_first_step(tmp_path):
    words = ["train", *SMALL, "--steps", "1", "--out"]
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_STEP_NUM_TASKS": "1"}
    for name, more, noted in (("a", [], 0), ("b", ["--threads", "2"], 1)):
        begun = succeeded(*words, tmp_path / name, *more, env=slurm).stdout.partition("step 1/")[0]
        assert len(re.findall(r"^--threads 2 ", begun, re.MULTILINE)) == noted

"""Jobs of a real Slurm that are stopped and resume. A run is held still when it is to be stopped."""

import ctypes.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from batchjob import STEPS, WORDS, same
from slurmcluster import BINDING, lacking, slurm_cluster
from standstill import standing_still

from conftest import distgpt, inside, metrics, needs_mpi

pytestmark = pytest.mark.ranks

SLURM = ("submit", "--system", "slurm")
TWO_NODES = [*SLURM, "--nodes", "2", "--mpi", "pmi2", "--time", "1h"]


def written(*words, **how):
    """The script as text, which is one that bash can read."""
    result = inside(*words, **how)
    assert result.returncode == 0, result.stderr
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    return result.stdout


ON_SLURM = [pytest.mark.slow, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(200)]
ON_SLURM.append(pytest.mark.skipif(bool(lacking()), reason=lacking()))


def on_slurm(test):
    for mark in ON_SLURM:
        test = mark(test)
    return needs_mpi(test)


def on_slurm_for_long(test):
    return pytest.mark.cluster(on_slurm(test))


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as found:
        yield found


class Submitted:
    """A job, and the run that it trains."""

    def __init__(self, cluster, folder, number, element=""):
        self.cluster, self.folder, self.number = cluster, folder, number
        self.run = folder / (f"array/{element.rpartition('_')[2]}" if element else "my run's")
        self.called = element or number
        self.begun_at = self._steps()

    @property
    def state(self):
        return self.cluster.job(self.called)["JobState"]

    def _steps(self):
        """How many have been logged by all its jobs."""
        path = self.run / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def ended(self):
        """Its state once it is over, however often it was requeued."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")

        def state():
            return now if (now := self.state) in over else None

        return self.cluster.wait_for(state)

    def log(self, attempt):
        (path,) = self.folder.glob(f"*-{self.called}.{attempt}.log")
        return path.read_text()

    def said(self):
        """The log of the script itself."""
        (path,) = self.folder.glob(f"*-{self.called}.log")
        return path.read_text()

    @contextmanager
    def held(self):
        """Its ranks stand still after some steps, until the end or until Slurm wakes them."""
        self.cluster.wait_for(lambda: self._steps() > self.begun_at + 5)
        ranks = self.cluster.wait_for(self._ranks)
        with standing_still(ranks):
            yield ranks

    def _ranks(self):
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (process / "environ").read_bytes().split(b"\0")
                mine = {b"SLURM_JOB_ID=%d" % self.number, b"SLURM_STEP_ID=0"} <= {*environ}
                if mine and b"train" in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(process)
        return found


def submit(cluster, folder, *options, words=WORDS):
    """By `distgpt submit --system slurm --submit`, on two nodes with a rank each."""
    folder.mkdir(exist_ok=True)
    arguments = ["--submit", *options, "--", *words, "--out", "my run's"]
    result = distgpt(*TWO_NODES, *arguments, cwd=folder, env=cluster.environ)
    assert result.returncode == 0, result.stderr
    return Submitted(cluster, folder, int(re.search(r"Submitted batch job (\d+)", result.stdout)[1]))


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    """A job that nobody stopped."""
    job = submit(cluster, tmp_path_factory.mktemp("finished"))
    assert job.ended() == "COMPLETED", (job.said(), job.log(0))
    return job


@on_slurm
def test_a_job_on_two_nodes_trains_as_mpirun_does(finished, tmp_path):
    assert "attempt 0 left with 0; newest checkpoint: step-00000080" in finished.said()
    assert "2 ranks" in finished.log(0) and finished.cluster.job(finished.number)["NodeList"] == "n[1-2]"
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  step 80/80 ", finished.log(0), re.MULTILINE)
    begun = json.loads((finished.run / "history.jsonl").read_text().splitlines()[0])
    assert (begun["job"]["system"], begun["job"]["id"]) == ("Slurm", str(finished.number))
    assert begun["launcher"] == "srun" and len(begun["hosts"]) in (1, 2)  # two nodes of this one machine
    here = distgpt(*WORDS, "--stage", "mpi", "--threads", "1", "--out", tmp_path / "run", ranks=2)
    assert here.returncode == 0, here.stderr
    assert same(tmp_path / "run", finished.run)


@on_slurm
def test_ranks_that_srun_starts_without_a_way_to_meet_are_refused(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--mpi", "none")
    assert job.ended() == "FAILED" and cluster.job(job.number)["ExitCode"] == "2:0"
    assert "launched as 2 processes, but mpi4py found itself alone" in job.log(0)
    assert not job.run.exists()


OPEN_MPI = ctypes.util.find_library("mpi") if shutil.which("mpirun.openmpi") else None


@on_slurm_for_long
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Open MPI: apt install openmpi-bin libopenmpi-dev")
def test_a_job_of_open_mpi_by_pmix_has_the_bits_of_mpich_and_is_saved_when_it_is_stopped(finished, tmp_path):
    """As where a site has its own MPI: a module brings the library, Slurm the way to meet.

    Of one node: two of them would take the same folder in /tmp, where Slurm leaves what PMIx needs.
    """
    of_the_site = ("--mpi", "pmix", "--setup", f"export MPI4PY_LIBMPI={OPEN_MPI}")
    job = submit(finished.cluster, tmp_path, "--nodes", "1", "--ranks-per-node", "2", *of_the_site)
    requeued(job)
    assert job.ended() == "COMPLETED", (job.said(), job.log(0))
    begun = json.loads((job.run / "history.jsonl").read_text().splitlines()[0])
    assert begun["launcher"] == "srun" and begun["mpi"].startswith("Open MPI")
    assert same(job.run, finished.run)


@on_slurm_for_long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_described_node_are_bound_to_cores_of_their_own(tmp_path):
    """By the script's own srun, which starts something that shows where it may run."""
    words = ["--node", "1x2", "--ranks-per-node", "2", "--mpi", "none", "--time", "5m", "--name", "bound"]
    script = written(*SLURM, *words, "train", cwd=tmp_path)
    show = shlex.join([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"])
    script = re.sub(r"(--wait=60 \\\n  ).*?( \\\n  >>)", lambda found: found[1] + show + found[2], script, flags=re.S)
    with slurm_cluster(BINDING) as own:
        own.call("sbatch", "--wait", input=script, cwd=tmp_path)
    (log,) = tmp_path.glob("bound-*.0.log")
    assert len({*log.read_text().splitlines()}) == len(log.read_text().split()) == 2  # a core each


def signalled(*words):
    def stop(job):
        with job.held():
            job.cluster.call("scancel", *words, job.number)

    return stop


def requeued(job):
    with job.held():
        job.cluster.call("scontrol", "requeue", job.number)


def preempted(job):
    """By a job that needs both nodes and has a higher priority."""
    with job.held():
        important = ["sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true"]
        job.cluster.call(*important)
        job.cluster.wait_for(lambda: job.state != "RUNNING" or "PreemptTime" in job.cluster.job(job.number))


def out_of_time(job):
    """Nothing but the time limit: the ranks stand still until Slurm has signalled both."""
    usr1 = 1 << signal.SIGUSR1 - 1

    def has_it(rank):
        try:
            status = (rank / "status").read_text()
        except OSError:  # it was woken, too, and has left
            return True
        return any(int(mask, 16) & usr1 for mask in re.findall(r"^(?:Sig|Shd)Pnd:\s+(\w+)", status, re.M))

    with job.held() as ranks:
        job.cluster.wait_for(lambda: all(map(has_it, ranks)))
    job.cluster.wait_for(lambda: job.state == "PENDING")
    job.cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")  # enough for the rest


# How a job is stopped, its options, and the code with which its ranks leave. A preemption stops all jobs
# that run, so these come first; the last one waits for so long that all others have been requeued.
STOPPED = {
    "preempted": (preempted, ["--directive", "--partition=low"], 143),
    "USR1 to the ranks": (signalled("--signal=USR1"), [], 75),
    "USR1 to the script": (signalled("--signal=USR1", "--batch"), [], 75),
    "requeued": (requeued, [], 143),
    "out of time": (out_of_time, ["--time", "1m", "--directive", "--signal=USR1@60"], 75),
}


@pytest.fixture(scope="module")
def stopped(finished, tmp_path_factory):
    """A job for each way, stopped in its first attempt. Requeued ones wait at the same time."""
    jobs = {}
    for way, (stop, options, _) in STOPPED.items():
        jobs[way] = submit(finished.cluster, tmp_path_factory.mktemp("stopped"), *options)
        stop(jobs[way])
    return jobs


@on_slurm_for_long
@pytest.mark.parametrize("way", STOPPED)
def test_a_job_that_was_stopped_ends_as_if_it_had_not_been(way, stopped, finished):
    job, code = stopped[way], STOPPED[way][-1]
    assert job.ended() == "COMPLETED", (job.said(), job.log(0))
    assert f"attempt 0 left with {code}" in job.said() and "attempt 1 left with 0" in job.said()
    assert "is saved: resume with" in job.log(0) and "resum" in job.log(1)
    assert same(job.run, finished.run)


# What ends a job for good, the state it is in then, and the code with which its ranks leave.
ENDED = {
    "cancelled": ([], "CANCELLED", 143),
    "TERM to all, srun not among them": (["--signal=TERM", "--full"], "FAILED", 75),
}


@on_slurm_for_long
@pytest.mark.parametrize("way", ENDED)
def test_a_job_that_was_ended_has_saved_and_stays_so(way, cluster, tmp_path):
    words, state, code = ENDED[way]
    job = submit(cluster, tmp_path)
    with job.held():
        cluster.call("scancel", *words, job.number)
    assert job.ended() == state
    cluster.wait_for(lambda: f"left with {code}" in job.said())
    assert "is saved: resume with" in job.log(0) and 0 < max(metrics(job.run)) < STEPS
    time.sleep(1)
    assert job.state == state


@on_slurm_for_long
def test_a_job_that_never_gets_on_is_not_queued_for_ever(cluster, tmp_path):
    """Its ranks ask for another attempt, and have left no checkpoint."""
    script = written(*SLURM, "--time", "1h", "--name", "idle", "train", cwd=tmp_path)
    edited = re.sub(r"\S*distgpt train ", "sh -c 'exit 75' ", script)
    assert edited != script
    (tmp_path / "job.sh").write_text(edited)
    number = cluster.call("sbatch", "--parsable", "job.sh", cwd=tmp_path)
    job = Submitted(cluster, tmp_path, int(number))
    assert job.ended() == "FAILED" and cluster.job(job.number)["ExitCode"] == "75:0"
    assert "no step was finished in this attempt: not queued again" in job.said()


@on_slurm_for_long
def test_a_successor_ends_the_run_where_a_job_is_not_queued_again(finished, tmp_path):
    job = submit(finished.cluster, tmp_path, "--successor")
    with job.held():
        job.cluster.call("scancel", "--signal=USR1", job.number)
    assert job.ended() == "COMPLETED", (job.said(), job.log(0))
    assert "Submitted batch job" in job.said() and (job.run / f"followed-{job.number}").is_dir()
    successor = Submitted(job.cluster, tmp_path, job.number + 1)
    assert successor.ended() == "COMPLETED" and "attempt 0 left with 0" in successor.said()
    assert same(job.run, finished.run)


@on_slurm_for_long
def test_one_element_of_an_array_is_requeued_alone_and_resumes_in_its_own_directory(cluster, tmp_path):
    """It is the one whose number is that of the whole array, which has another element on the other node."""
    words = [*SLURM, "--time", "1h", "--array", "1-2", "--submit", "--", *WORDS]
    words += ["--steps", "160", "--seed", "$SLURM_ARRAY_TASK_ID", "--out", "array"]
    result = distgpt(*words, cwd=tmp_path, env=cluster.environ)
    assert result.returncode == 0, result.stderr
    number = re.search(r"Submitted batch job (\d+)", result.stdout)[1]
    jobs = {}
    for element in (f"{number}_1", f"{number}_2"):
        cluster.wait_for((tmp_path / "array" / element[-1] / "metrics.jsonl").exists)
        jobs[element] = Submitted(cluster, tmp_path, int(cluster.job(element)["JobId"]), element)
        jobs[element].begun_at = 0
    stopped, other = sorted(jobs.values(), key=lambda job: job.number)
    assert stopped.number == int(number)
    with stopped.held():
        cluster.call("scancel", "--signal=USR1", stopped.called)
    assert stopped.ended() == other.ended() == "COMPLETED", (stopped.said(), other.said())
    assert "attempt 0 left with 75" in stopped.said() and "attempt 1 left with 0" in stopped.said()
    assert "attempt 0 left with 0" in other.said() and "attempt 1" not in other.said()
    assert max(metrics(stopped.run)) == max(metrics(other.run)) == 160
    assert not same(stopped.run, other.run)  # of another seed


@on_slurm_for_long
def test_a_run_moves_to_one_node_and_back(finished, tmp_path):
    """The same script, with other options for sbatch. As many ranks give the same bytes."""
    cluster = finished.cluster
    job = submit(cluster, tmp_path)
    script = cluster.call("scontrol", "write", "batch_script", job.number, "-")
    file = tmp_path / "job.sh"
    file.write_text(script)
    for options in (["--nodes=1", "--ntasks-per-node=2"], []):
        with job.held():
            cluster.call("scancel", job.number)
        assert job.ended() == "CANCELLED"
        cluster.wait_for(lambda job=job: "left with 143" in job.said())
        number = cluster.call("sbatch", "--parsable", *options, file, cwd=tmp_path)
        job = Submitted(cluster, tmp_path, int(number))
    assert job.ended() == "COMPLETED", (job.said(), job.log(0))
    assert same(job.run, finished.run)

"""Jobs of real batch systems, if installed: stopped, requeued, followed, ended and finished.

volclava, an open clone of LSF, has no -wa and -wt. The tests send the URG that LSF sends before the limit.
"""

import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from contextlib import ExitStack
from functools import cache, partial

import fluxinstance
import gridengine
import lava
import openpbs
import pytest
import slurmcluster
from distgpt.cluster.jobs import systems
from schedulers import OPEN_MPI, RUN, STEPS, WORDS, BatchJob, is_asked, variable

from conftest import distgpt, losses, metrics, needs_mpi, succeeded, summary

# Each system's module, fixture, and options of a job with two ranks.
SYSTEMS = {
    "slurm": (slurmcluster, slurmcluster.slurm_cluster, "--nodes 2 --mpi pmi2"),
    "sge": (gridengine, gridengine.grid_engine, "--ranks-per-node 2"),
    "lsf": (lava, lava.lava, "--ranks-per-node 2"),
    "pbs": (openpbs, openpbs.open_pbs, "--ranks-per-node 2"),
    "flux": (fluxinstance, fluxinstance.flux_instance, "--ranks-per-node 2"),
}
ON_TWO_NODES = ("--nodes", "2", "--ranks-per-node", "1")
ALONE = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), *ALONE, needs_mpi]


def on(system, *values, name=""):
    reason = SYSTEMS[system][0].lacking()
    marks = [pytest.mark.cluster, pytest.mark.skipif(bool(reason), reason=reason)]
    return pytest.param(system, *values, marks=marks, id=f"{system} {name}".strip())


def only(*systems):
    return pytest.mark.parametrize("cluster", [on(system) for system in systems], indirect=True)


def table(names, cases):
    rows = [on(system, *values, name=name) for (system, name), values in cases.items()]
    return pytest.mark.parametrize(f"cluster, {names}", rows, indirect=["cluster"])


@pytest.fixture(scope="module")
def started():
    with ExitStack() as stack:
        yield cache(lambda system: stack.enter_context(SYSTEMS[system][1]()))


@pytest.fixture
def cluster(started, request):
    return started(request.param)


@pytest.fixture
def folder(cluster, tmp_path):
    return cluster.place(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    succeeded(*WORDS, "--stage", "mpi", "--threads", "1", "--out", run, ranks=2, timeout=300, by=distgpt)
    return run


@pytest.fixture
def submit(cluster, folder):
    def submitted(*options, **how):
        of_two = () if "--ranks-per-node" in options else SYSTEMS[cluster.system][2].split()
        return cluster.submit(folder, *of_two, *([] if "--time" in options else ["--time", "1h"]), *options, **how)

    return submitted


def same(run, finished):
    saved = [(path / "weights.safetensors").read_bytes() for path in (run, finished)]
    return saved[0] == saved[1] and losses(run) == losses(finished)


def begun(run):
    return json.loads((run / "history.jsonl").read_text().splitlines()[0])


# How to stop a job. A function that is returned runs once the ranks have been woken.
def asked(job, ranks):
    job.cluster.wait_for(lambda: all(map(is_asked, ranks)))


def told(*words, waits=False, call=lambda cluster: cluster.call):
    """Stop the job by a command of the system; `waits`: until the ranks have the signal."""

    def stop(job, ranks):
        call(job.cluster)(*(word.format(job.called) for word in words))
        if waits:
            asked(job, ranks)

    return stop


def before_its_end(job, ranks, seconds=2):
    end = float(variable(ranks[0], "DISTGPT_JOB_END"))
    if job.cluster.system == "flux":
        left = float(job.cluster.call("job", "timeleft", job.number))
        assert 15 < time.time() + left - end < 25  # time to submit a successor
    job.cluster.wait_for(lambda: time.time() > end - seconds)


def warned(job, ranks):
    job.cluster.warn(job)
    asked(job, ranks)


def requeued_by_lsf(job, ranks):
    job.cluster.call("brequeue", job.number)
    time.sleep(3)  # LSF answers before it signals the ranks


def requeued_by_pbs(job, ranks):
    assert job.cluster.by_user("qrerun", job.number, check=False).returncode != 0
    threading.Thread(target=job.cluster.call, args=("qrerun", job.number)).start()
    asked(job, ranks)


def preempted(job, ranks):
    call, knows = job.cluster.call, partial(job.cluster.job, job.number)
    call("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    job.cluster.wait_for(lambda: knows()["JobState"] != "RUNNING" or "PreemptTime" in knows())


def out_of_time(job, ranks):
    asked(job, ranks)

    def prolong():
        job.cluster.wait_for(lambda: job.cluster.job(job.number)["JobState"] == "PENDING")
        job.cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")

    return prolong


def check_continued(job, code, finished, follows=False):
    last, attempt = (job.successor(), 0) if follows else (job, 1)
    last.log(attempt)  # waits for it
    job.cluster.finish()
    step = int(re.search(r"step (\d+) is saved", job.log())[1])
    assert f"resuming from {RUN}/checkpoints/step-{step:08}" in last.log(attempt)
    assert code is None or f"attempt 0 exited with {code}; newest checkpoint: step-" in job.said()
    assert f"attempt {attempt} left with 0" in last.said()
    assert job.followed() == [f"followed-{job.number}"] * follows
    assert "2 ranks" in job.log() and same(job.run, finished)
    of = begun(job.run)["job"]
    assert of["system"] == systems.SYSTEMS[job.cluster.system].name and str(job.number).lstrip("f") in of["id"]


TO_LAST = "flux job kill -s {} $(flux job last)"  # cancel would end a broker
STOPPED = {
    ("slurm", "preempted"): (["--directive", "--partition=low"], preempted, 143),
    ("slurm", "USR1 to the ranks"): ([], told("scancel", "--signal=USR1", "{}"), 75),
    ("slurm", "USR1 to the script"): ([], told("scancel", "--signal=USR1", "--batch", "{}"), 75),
    ("slurm", "requeued"): ([], told("scontrol", "requeue", "{}"), 143),
    ("slurm", "at the limit"): (["--time", "1m", "--directive", "--signal=USR1@60"], out_of_time, 75),
    ("slurm", "followed"): (["--successor"], told("scancel", "--signal=USR1", "{}"), 75),
    ("sge", "at the limit"): (["--time", "60s"], asked, 75),
    ("sge", "followed"): (["--time", "60s", "--successor"], asked, 75),
    # LSF signals all processes of a job.
    ("lsf", "URG before the limit"): ([], warned, 75),
    ("lsf", "USR2"): ([], told("bkill", "-s", "USR2", "{}", waits=True), 75),
    ("lsf", "USR1"): ([], told("bkill", "-s", "USR1", "{}", waits=True), 75),
    ("lsf", "at the limit"): (["--time", "1m"], asked, 75),
    ("lsf", "followed"): (["--successor"], lambda job, _: job.cluster.warn(job), 75),
    ("lsf", "requeued"): ([], requeued_by_lsf, None),
    ("pbs", "followed"): (["--time", "45s"], partial(before_its_end, seconds=6), 75),
    ("pbs", "followed on two nodes"): (["--time", "45s", *ON_TWO_NODES], partial(before_its_end, seconds=6), 75),
    ("pbs", "requeued"): ([*ON_TWO_NODES], requeued_by_pbs, None),
    ("flux", "followed"): (["--time", "100s"], before_its_end, 75),
    ("flux", "USR1 on two nodes"): ([*ON_TWO_NODES], told("proxy", "{}", TO_LAST.format("USR1")), 75),
}


@table("options, stop, code", STOPPED)
def test_stopped_job_resumes_with_identical_results(cluster, submit, finished, options, stop, code):
    [job] = submit(*options)
    with job.held() as ranks:
        after = stop(job, ranks)
    if after:
        after()
    follows = "--successor" in options or (cluster.system in ("pbs", "flux") and code == 75)
    check_continued(job, code, finished, follows)


ENDED = {
    ("slurm", "cancelled"): ([], told("scancel", "{}"), 143),
    ("slurm", "TERM to all but srun"): ([], told("scancel", "--signal=TERM", "--full", "{}"), 75),
    ("sge", "deleted"): ([], told("qdel", "{}"), 75),
    ("lsf", "killed"): (["--successor"], told("bkill", "{}"), 130),
    ("pbs", "deleted"): ([], told("qdel", "{}", waits=True, call=lambda cluster: cluster.by_user), 143),
    ("flux", "cancelled"): ([], told("cancel", "{}"), 75),
    ("flux", "TERM on two nodes"): ([*ON_TWO_NODES], told("proxy", "{}", TO_LAST.format("TERM")), 143),
}


@table("options, end, code", ENDED)
def test_ended_job_saves_and_is_not_restarted(cluster, submit, options, end, code):
    [job] = submit(*options)
    with job.held() as ranks:
        end(job, ranks)
    cluster.finish()
    cluster.wait_for(lambda: f"attempt 0 exited with {code}; newest checkpoint: step-" in job.said())
    assert job.newest() == max(metrics(job.run)) < STEPS
    time.sleep(3)
    assert not cluster.queued() and not job.followed() and "attempt 1" not in job.said()


# An array's options, the element that is stopped, how, and whether a successor takes its place. In Slurm
# the last element also has the number of the array.
ARRAYS = {
    ("slurm", ""): (["--nodes", "1", "--mpi", "none"], "2", told("scancel", "--signal=USR1", "{}"), False),
    ("sge", ""): (["--time", "60s"], "1", asked, False),
    ("lsf", ""): (["--successor"], "1", lambda job, _: job.cluster.warn(job), True),
    ("pbs", ""): (["--time", "45s"], "1", partial(before_its_end, seconds=6), True),
}


@table("options, stopped, stop, follows", ARRAYS)
def test_stopped_array_element_resumes_separately(cluster, submit, folder, options, stopped, stop, follows):
    [array] = submit("--array", "1-2%1", *options, words=[*WORDS, "--seed", "$ELEMENT"])
    first, second = (BatchJob(cluster, folder, array.number, element) for element in "12")
    job, other = (first, second) if stopped == "1" else (second, first)
    with job.held(*["SLURM_STEP_ID=0", 1] * (cluster.system == "slurm")) as ranks:
        stop(job, ranks)
    last = job
    if follows:
        last = BatchJob(cluster, folder, cluster.successor(job), "1" * (cluster.system == "lsf"), "1")
    last.log(int(not follows))
    cluster.finish()
    assert "attempt 0 exited with 75" in job.said() and f"attempt {int(not follows)} left with 0" in last.said()
    assert "attempt 0 exited with 0" in other.said() and "attempt 1" not in other.said()
    assert len(losses(first.run)) == len(losses(second.run)) == STEPS
    assert losses(first.run) != losses(second.run)  # seeds differ
    assert job.followed() == [f"followed-{job.called}"] * follows


ON_SLURM = pytest.mark.skipif(bool(slurmcluster.lacking()), reason=slurmcluster.lacking())


@ON_SLURM
def test_slurm_job_on_two_nodes_matches_mpirun(started, finished, tmp_path):
    """Also reject ranks that srun starts without PMI."""
    cluster = started("slurm")
    [job] = cluster.submit(tmp_path, "--nodes", "2", "--mpi", "pmi2", "--time", "1h")
    cluster.finish()
    assert f"attempt 0 left with 0; newest checkpoint: step-{STEPS:08}" in job.said()
    assert "2 ranks" in job.log() and cluster.job(job.number)["NodeList"] == "n[1-2]"
    assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  step {STEPS}/{STEPS} ", job.log(), re.MULTILINE)
    assert begun(job.run)["launcher"] == "srun" and same(job.run, finished)
    shutil.rmtree(job.run)
    [job] = cluster.submit(tmp_path, "--nodes", "2", "--mpi", "none", "--time", "1h")
    cluster.finish()
    assert "attempt 0 left with 2" in job.said() and "launched as 2 processes" in job.log() and not job.run.exists()


@only("slurm")
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Debian's Open MPI: apt install openmpi-bin")
def test_open_mpi_by_pmix_saves_and_matches_mpich(cluster, submit, finished):
    """A site's own MPI by a module, on one node: two nodes would share PMIx's directory in /tmp."""
    [job] = submit("--mpi", "pmix", "--ranks-per-node", "2", "--setup", f"export MPI4PY_LIBMPI={OPEN_MPI}")
    with job.held("PMIX_RANK"):
        cluster.call("scontrol", "requeue", job.number)
    check_continued(job, 143, finished)
    assert begun(job.run)["mpi"].startswith("Open MPI")


def written(folder, *words):
    return succeeded("submit", "--system", "slurm", "--time", "5m", *words, "train", cwd=folder).stdout


@pytest.mark.cluster
@ON_SLURM
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_described_node_binds_ranks_to_separate_cores(tmp_path):
    """The script's srun starts a program that prints its CPUs."""
    script = written(tmp_path, "--node", "1x2", "--mpi", "none", "--ranks-per-node", "2", "--name", "bound")
    show = shlex.join([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"])
    script = re.sub(r"(--wait=60 \\\n  ).*?( \\\n  >>)", lambda found: found[1] + show + found[2], script, flags=re.S)
    with slurmcluster.slurm_cluster(slurmcluster.BINDING) as own:
        own.call("sbatch", "--wait", input=script, cwd=tmp_path)
    (log,) = tmp_path.glob("bound-*.0.log")
    assert len({*log.read_text().splitlines()}) == len(log.read_text().split()) == 2  # one core each


@only("slurm")
def test_job_without_progress_is_not_requeued(cluster, folder):
    """The ranks exit with 75 and no checkpoint."""
    edited = re.sub(r"\S*distgpt train ", "sh -c 'exit 75' ", script := written(folder, "--name", "my-run-s"))
    assert edited != script
    number = cluster.call("sbatch", "--parsable", input=edited, cwd=folder).strip()
    cluster.finish()
    said = BatchJob(cluster, folder, number).said()
    assert "attempt 0 exited with 75" in said and "attempt 1" not in said


@only("slurm")
def test_run_moves_to_one_node_and_back(cluster, submit, folder, finished):
    [job] = submit()
    (folder / "job.sh").write_text(cluster.call("scontrol", "write", "batch_script", job.number, "-"))
    for options in (["--nodes=1", "--ntasks-per-node=2"], []):
        with job.held():
            cluster.call("scancel", job.number)
        cluster.finish()
        cluster.wait_for(lambda job=job: "exited with 143" in job.said())
        number = cluster.call("sbatch", "--parsable", *options, folder / "job.sh", cwd=folder).strip()
        job = BatchJob(cluster, folder, number)
    cluster.finish()
    assert "attempt 0 exited with 0" in job.said() and same(job.run, finished)


@only("lsf")
def test_suspended_job_resumes(cluster, submit, finished):
    [job] = submit()
    with job.held():
        cluster.call("bstop", job.number)
        cluster.wait_for(lambda: (int(job.number), "USUSP") in cluster.states())
        cluster.call("bresume", job.number)
    cluster.finish()
    assert "attempt 0 exited with 0" in job.said() and same(job.run, finished)


@only("lsf")
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Debian's Open MPI: apt install openmpi-bin")
@pytest.mark.parametrize(("how", "code"), [("warned", 0), ("killed", 1)])
def test_open_mpi_leaves_time_to_save(cluster, submit, finished, how, code):
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    [job] = submit("--mpi", "openmpi", "--setup", f"export MPI4PY_LIBMPI={OPEN_MPI} {root}")
    with job.held("OMPI_COMM_WORLD_RANK") as ranks:
        assert {variable(rank, "OMPI_MCA_odls_base_sigkill_timeout") for rank in ranks} == {"10"}
        cluster.warn(job) if how == "warned" else cluster.call("bkill", job.number)
    cluster.finish()
    # Output of the ranks is lost while it ends them.
    assert f"exited with {code}; newest checkpoint: step-{max(metrics(job.run)):08}" in job.said()
    assert how == "killed" or same(job.run, finished)


@only("pbs")
def test_successor_ignores_forgotten_pbs_jobs(cluster, submit, folder, finished):
    (folder / "first.sh").write_text("true\n")
    before = cluster.by_user("qsub", "first.sh", cwd=folder).strip()
    [job] = submit("--time", "45s", "--directive", f"-W depend=afterany:{before}")
    with job.held() as ranks:
        before_its_end(job, ranks, seconds=6)
    cluster.call("qdel", "-x", before)
    check_continued(job, 75, finished, follows=True)
    assert "time limit reached" in job.log() and cluster.attribute(job.number, "Exit_status") == "0"


@only("pbs")
def test_lost_host_restarts_job_on_another(cluster, submit, finished):
    cluster.call("pbsnodes", "-o", "node1")
    [job] = submit()
    with job.held():
        cluster.call("pbsnodes", "-r", "node1")
        cluster.lose("node2")
    job.log(1)  # waits for it
    cluster.finish()
    cluster.return_node("node2")
    assert "2 ranks on node2" in job.log() and "2 ranks on node1" in job.log(1)
    assert f"resuming from {RUN}/checkpoints/step-" in job.log(1)
    assert "attempt 1 exited with 0" in job.said() and same(job.run, finished)


@only("pbs")
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Debian's Open MPI: apt install openmpi-bin")
def test_open_mpi_finds_pbs_nodes(cluster, submit, finished):
    # Open MPI passes only listed variables to other nodes.
    own = f"export MPI4PY_LIBMPI={OPEN_MPI} OMPI_MCA_plm_rsh_agent={cluster.folder / 'remote-start'}"
    named = "export OMPI_MCA_mca_base_env_list=MPI4PY_LIBMPI"
    [job] = submit("--mpi", "openmpi", *ON_TWO_NODES, "--setup", own, "--setup", named)
    cluster.finish()
    assert "2 ranks on node1, node2" in job.log() and same(job.run, finished)


@only("flux")
def test_flux_elements_have_separate_directories_and_seeds(cluster, submit, folder):
    options = ["--array", "1-2", "--setup", "export SET='b c'", "--prefix", "env A=B", "--directive", "--urgency=20"]
    jobs = submit(*options, words=[*WORDS, "--seed", "$ELEMENT", "--steps", "10"])
    cluster.finish()
    assert len(jobs) == 2
    for job in jobs:
        assert "attempt 0 exited with 0" in job.said()
        assert cluster.call("jobs", "-n", "-o", "{name} {urgency}", job.number).split() == ["my-run-s", "20"]
    first, second = (folder / RUN / element for element in "12")
    assert losses(first) != losses(second)


@only("flux")
def test_flux_ranks_get_cores_or_gpus(cluster, submit, folder):
    [job] = submit("--time", "10m")
    with job.held() as ranks:
        cores = {re.search(r"Cpus_allowed_list:\s+(\S+)", (rank / "status").read_text())[1] for rank in ranks}
    cluster.finish()
    assert len(cores) == 2
    about = summary(job.run)
    assert (about["job"]["id"], about["launcher"]) == (job.number.replace("f", "ƒ", 1), "flux run")
    report = """sh -c 'echo $FLUX_TASK_RANK $CUDA_VISIBLE_DEVICES >>"gpus $FLUX_TASK_RANK"'"""
    options = ["--nodes", "2", "--ranks-per-node", "4", "--cpus-per-task", "1", "--gpus-per-node", "2"]
    with fluxinstance.flux_instance(pretended="--cores=0-3 --gpus=0-1") as pretended:
        pretended.submit(folder, *options, "--mpi", "simple", "--time", "10m", "--prefix", report)
        pretended.finish()
    seen = sorted(path.read_text().split() for path in folder.glob("gpus *"))
    assert seen == [[str(rank), "0,1"] for rank in range(8)]

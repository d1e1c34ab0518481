"""Jobs of a real OpenPBS: saved before the limit, followed once, queued again, deleted, and finished."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from batchjob import OPEN_MPI, STEPS, WORDS, held, is_asked, marks, same, variable
from hosts import MPIRUN
from openpbs import lacking, open_pbs

from conftest import losses, metrics, needs_mpi

SPARE = 6  # seconds before the limit at which ranks that stood still have to save
pytestmark = marks(lacking())


@pytest.fixture(scope="module")
def cluster():
    with open_pbs() as found:
        yield found


@pytest.fixture(scope="module")
def finished(cluster):
    """The same run by the same user without a batch system, which nobody stopped."""
    folder = cluster.place("finished")
    words = [sys.executable, "-m", "distgpt", *WORDS, "--stage", "mpi", "--threads", "1", "--out", "run"]
    cluster.by_user(MPIRUN, "-n", "2", *words, cwd=folder, timeout=300)
    return folder / "run"


@pytest.fixture
def folder(cluster, request):
    """A folder with a space in its name."""
    return cluster.place(f"{request.node.name[5:25]} {time.monotonic_ns()}")


def submit(cluster, folder, *options, words=WORDS):
    """By `distgpt submit --submit`, with two ranks; returns the job's number."""
    line = cluster.remote_start()
    head = [sys.executable, "-m", "distgpt", "submit", "--system", "pbs", "--setup", line, "--submit"]
    said = cluster.by_user(*head, *options, "--", *words, "--out", "my run's", cwd=folder)
    return int(re.search(r"^(\d+)(?:\[\])?\.node1$", said, re.M)[1])


def newest_checkpoint(run):
    return max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def stopped_at_the_limit(cluster, folder, run="my run's"):
    with held(cluster, folder, run) as ranks:
        end = int(variable(ranks[0], "DISTGPT_JOB_END"))
        cluster.wait_for(lambda: time.time() > end - SPARE)


def said(cluster, folder, number):
    """What the script has printed, which PBS delivers when the job has ended."""
    path = folder / f"my-run-s.o{number}"
    cluster.wait_for(path.exists)
    return path.read_text()


@needs_mpi
@pytest.mark.parametrize("place", ["--ranks-per-node 2", "--nodes 2 --ranks-per-node 1"])
def test_a_job_saves_before_its_limit_is_followed_once_and_ends_as_if_not_stopped(cluster, finished, folder, place):
    (folder / "first.sh").write_text("true\n")
    before = cluster.by_user("qsub", "first.sh", cwd=folder).strip()
    waits = ("--directive", f"-W depend=afterany:{before}")
    number = submit(cluster, folder, *place.split(), "--time", "45s", *waits)
    stopped_at_the_limit(cluster, folder)
    cluster.call("qdel", "-x", before)  # PBS forgets it, as it does by default
    cluster.wait_for(lambda: not cluster.queued())
    log = said(cluster, folder, number)
    assert "attempt 0 left with 75; newest checkpoint: step-" in log and f"{number + 1}.node1" in log, log
    assert "attempt 0 left with 0" in said(cluster, folder, number + 1)
    assert sorted(path.name for path in folder.glob("*.log")) == [
        f"my-run-s-{number}.0.log",
        f"my-run-s-{number + 1}.0.log",
    ]
    hosts = "node1, node2" if "--nodes" in place else "node[12]"
    first = (folder / f"my-run-s-{number}.0.log").read_text()
    assert re.search(f"2 ranks on {hosts}, 1 thread", first) and "the time is up" in first
    assert (folder / "my run's" / f"followed-{number}").is_dir()
    assert cluster.attribute(number, "Exit_status") == "0"
    assert same(folder / "my run's", finished)


@needs_mpi
def test_a_job_that_is_deleted_has_saved_and_stays_so(cluster, finished, folder):
    number = submit(cluster, folder, "--ranks-per-node", "2", "--time", "10m")
    with held(cluster, folder) as ranks:
        cluster.by_user("qdel", number)
        cluster.wait_for(lambda: all(map(is_asked, ranks)))
    cluster.wait_for(lambda: not cluster.queued())
    assert "attempt 0 left with 143; newest checkpoint" in said(cluster, folder, number)
    assert newest_checkpoint(folder / "my run's") == max(metrics(folder / "my run's")) < STEPS
    time.sleep(3)
    assert not cluster.queued() and not [*(folder / "my run's").glob("followed-*")]


@needs_mpi
def test_a_job_that_is_queued_again_has_saved_and_resumes(cluster, finished, folder):
    number = submit(cluster, folder, "--nodes", "2", "--ranks-per-node", "1", "--time", "10m")
    with ThreadPoolExecutor(1) as pool:
        with held(cluster, folder) as ranks:
            assert cluster.by_user("qrerun", number, check=False).returncode != 0  # is the operators'
            rerun = pool.submit(cluster.call, "qrerun", number)  # which returns when the job has ended
            cluster.wait_for(lambda: all(map(is_asked, ranks)))
        rerun.result()
    cluster.wait_for(lambda: not cluster.queued())
    first, second = ((folder / f"my-run-s-{number}.{attempt}.log").read_text() for attempt in (0, 1))
    step = int(re.search(r"ended by SIGTERM; step (\d+) is saved", first)[1])
    assert f"resuming from my run's/checkpoints/step-{step:08}" in second
    assert "attempt 1 left with 0" in said(cluster, folder, number)
    assert same(folder / "my run's", finished)


@needs_mpi
def test_a_job_whose_host_is_lost_begins_again_on_another(cluster, finished, folder):
    cluster.call("pbsnodes", "-o", "node1")
    number = submit(cluster, folder, "--ranks-per-node", "2", "--time", "10m")
    with held(cluster, folder):
        cluster.call("pbsnodes", "-r", "node1")
        cluster.lose("node2")
    cluster.wait_for(lambda: not cluster.queued())
    cluster.return_node("node2")
    begun = [(folder / f"my-run-s-{number}.{attempt}.log").read_text() for attempt in (0, 1)]
    assert "2 ranks on node2" in begun[0] and "2 ranks on node1" in begun[1]
    assert "resuming from my run's/checkpoints/step-" in begun[1]
    assert "attempt 1 left with 0" in said(cluster, folder, number)
    assert same(folder / "my run's", finished)


@needs_mpi
def test_an_element_of_an_array_is_followed_by_a_job_of_its_own(cluster, finished, folder):
    words = [*WORDS, "--seed", "$PBS_ARRAY_INDEX"]
    asked = ("--ranks-per-node", "2", "--time", "45s", "--array", "1-2%1")
    number = submit(cluster, folder, *asked, words=words)
    stopped_at_the_limit(cluster, folder, "my run's/1")
    running = lambda: cluster.call("qstat", "-t", f"{number}[]").count(" R ")  # noqa: E731
    assert running() <= 1
    cluster.wait_for(lambda: not cluster.queued())
    assert "attempt 0 left with 75" in said(cluster, folder, f"{number}.1")
    assert "attempt 0 left with 0" in said(cluster, folder, f"{number}.2")
    assert "attempt 0 left with 0" in said(cluster, folder, number + 1)
    first, second = (folder / "my run's" / element for element in "12")
    assert len(losses(first)) == len(losses(second)) == STEPS
    assert losses(first) != losses(second)
    assert [path.name for path in first.glob("followed-*")] == [f"followed-{number}[1]"]


@needs_mpi
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Debian's Open MPI: apt install openmpi-bin")
def test_open_mpi_finds_the_nodes_of_a_job_without_its_library(cluster, finished, folder):
    asked = ["--mpi", "openmpi", "--nodes", "2", "--ranks-per-node", "1", "--time", "10m"]
    # It gives ranks on other nodes the variables alone that are named here.
    own = f"export MPI4PY_LIBMPI={OPEN_MPI} OMPI_MCA_plm_rsh_agent={cluster.folder / 'remote-start'}"
    named = "export OMPI_MCA_mca_base_env_list=MPI4PY_LIBMPI"
    number = submit(cluster, folder, *asked, "--setup", own, "--setup", named)
    cluster.wait_for(lambda: not cluster.queued())
    first = (folder / f"my-run-s-{number}.0.log").read_text()
    assert "2 ranks on node1, node2" in first, first
    assert same(folder / "my run's", finished)

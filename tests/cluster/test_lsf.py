"""Jobs of a real volclava, an open clone of LSF: saved at the limit, queued again or followed, and finished.

The clone knows no -wa and -wt: where LSF sends URG before the limit by itself, the tests do it here.
"""

import json
import re
import time

import pytest
from batchjob import OPEN_MPI, STEPS, WORDS, held, is_asked, marks, same, uninterrupted, variable
from lava import lacking, lava

from conftest import distgpt, losses, metrics, needs_mpi

pytestmark = marks(lacking())


@pytest.fixture(scope="module")
def cluster():
    with lava() as found:
        yield found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("finished") / "run")


def submit(cluster, folder, *options, words=WORDS):
    """By `distgpt submit --submit`, with two ranks; returns the job's number."""
    head = ["submit", "--system", "lsf", "--ranks-per-node", "2", "--submit", *options, "--", *words]
    result = distgpt(*head, "--out", "my run's", cwd=folder, env=cluster.environ)
    assert result.returncode == 0, result.stderr
    return int(re.search(r"^Job <(\d+)> is submitted", result.stdout, re.M)[1])


def said(folder, number):
    """What the script has printed, with what LSF says of it."""
    return (folder / f"my-run-s-{number}.log").read_text()


def log_of(folder, number, attempt):
    return (folder / f"my-run-s-{number}.{attempt}.log").read_text()


def finish(cluster):
    cluster.wait_for(lambda: not cluster.queued())


@needs_mpi
@pytest.mark.parametrize("name", ["URG", "USR2", "USR1"])
def test_a_job_that_is_warned_is_saved_queued_again_and_ends_as_if_not_stopped(cluster, finished, tmp_path, name):
    """URG comes by -wa before the limit, USR2 at the limit. All processes of the job get the signal."""
    number = submit(cluster, tmp_path, "--time", "10m")
    with held(cluster, tmp_path) as ranks:
        cluster.warn(number) if name == "URG" else cluster.call("bkill", "-s", name, number)
        cluster.wait_for(lambda: all(map(is_asked, ranks)))
    finish(cluster)
    step = int(re.search(r"ended by SIGUSR1; step (\d+) is saved", log_of(tmp_path, number, 0))[1])
    assert f"resuming from my run's/checkpoints/step-{step:08}" in log_of(tmp_path, number, 1)
    assert "attempt 1 left with 0" in said(tmp_path, number)
    assert same(tmp_path / "my run's", finished)
    begun = json.loads((tmp_path / "my run's" / "history.jsonl").read_text().splitlines()[0])
    assert begun["job"] == {"system": "LSF", "id": str(number), "name": "my-run-s"}


@needs_mpi
def test_a_job_at_its_limit_is_saved_and_queued_again(cluster, finished, tmp_path):
    number = submit(cluster, tmp_path, "--time", "1m")
    with held(cluster, tmp_path) as ranks:
        cluster.wait_for(lambda: all(map(is_asked, ranks)))
    finish(cluster)
    assert "ended by SIGUSR1; step" in log_of(tmp_path, number, 0)
    assert "attempt 1 left with 0" in said(tmp_path, number)
    assert same(tmp_path / "my run's", finished)


@needs_mpi
def test_a_successor_is_submitted_once_and_finishes_the_run(cluster, finished, tmp_path):
    number = submit(cluster, tmp_path, "--time", "10m", "--successor")
    with held(cluster, tmp_path):
        cluster.warn(number)
    finish(cluster)
    assert [path.name for path in (tmp_path / "my run's").glob("followed-*")] == [f"followed-{number}"]
    assert sorted(path.name for path in tmp_path.glob("*.0.log")) == [
        f"my-run-s-{number}.0.log",
        f"my-run-s-{number + 1}.0.log",
    ]
    assert f"Job <{number + 1}> is submitted" in said(tmp_path, number)
    assert "attempt 0 left with 0" in said(tmp_path, number + 1)
    assert same(tmp_path / "my run's", finished)


@needs_mpi
def test_a_job_that_is_killed_has_saved_and_stays_so(cluster, finished, tmp_path):
    number = submit(cluster, tmp_path, "--time", "10m", "--successor")
    with held(cluster, tmp_path):
        cluster.call("bkill", number)
    finish(cluster)
    assert "attempt 0 left with 130; newest checkpoint: step-" in said(tmp_path, number)
    assert 0 < max(metrics(tmp_path / "my run's")) < STEPS
    time.sleep(3)
    assert not cluster.queued() and not [*(tmp_path / "my run's").glob("followed-*")]


@needs_mpi
def test_a_job_that_is_requeued_by_hand_has_saved_and_resumes(cluster, finished, tmp_path):
    number = submit(cluster, tmp_path, "--time", "10m")
    with held(cluster, tmp_path):
        cluster.call("brequeue", number)
        time.sleep(3)  # LSF answers before it signals: ranks that go on at once are done by then
    cluster.wait_for((tmp_path / f"my-run-s-{number}.1.log").exists)  # at first it is called done
    finish(cluster)
    step = int(re.search(r"step (\d+) is saved", log_of(tmp_path, number, 0))[1])
    assert f"resuming from my run's/checkpoints/step-{step:08}" in log_of(tmp_path, number, 1)
    assert "attempt 1 left with 0" in said(tmp_path, number)
    assert same(tmp_path / "my run's", finished)


@needs_mpi
def test_a_job_that_is_suspended_for_a_while_goes_on(cluster, finished, tmp_path):
    number = submit(cluster, tmp_path, "--time", "10m")
    with held(cluster, tmp_path):
        cluster.call("bstop", number)
        cluster.wait_for(lambda: (number, "USUSP") in cluster.states())
        cluster.call("bresume", number)
    finish(cluster)
    assert "attempt 0 left with 0" in said(tmp_path, number) and same(tmp_path / "my run's", finished)


@needs_mpi
def test_an_element_of_an_array_is_followed_by_one_of_its_own(cluster, finished, tmp_path):
    words = [*WORDS, "--seed", "$LSB_JOBINDEX"]
    number = submit(cluster, tmp_path, "--time", "10m", "--array", "1-2%1", "--successor", words=words)
    with held(cluster, tmp_path, "my run's/1"):
        assert [state for job, state in cluster.states() if job == number] == ["RUN", "PEND"]
        cluster.warn(number, 1)
    finish(cluster)
    assert "attempt 0 left with 75" in said(tmp_path, f"{number}.1")
    assert "attempt 0 left with 0" in said(tmp_path, f"{number}.2")
    assert "attempt 0 left with 0" in said(tmp_path, f"{number + 1}.1")
    first, second = (tmp_path / "my run's" / element for element in "12")
    assert len(losses(first)) == len(losses(second)) == STEPS
    assert losses(first) != losses(second)
    assert [path.name for path in first.glob("followed-*")] == [f"followed-{number}.1"]


@needs_mpi
@pytest.mark.skipif(OPEN_MPI is None, reason="needs Debian's Open MPI: apt install openmpi-bin")
@pytest.mark.parametrize(("how", "code"), [("warned", 0), ("killed", 1)])
def test_open_mpi_leaves_the_ranks_time_for_a_save(cluster, finished, tmp_path, how, code):
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    own = f"export MPI4PY_LIBMPI={OPEN_MPI} {root}"
    number = submit(cluster, tmp_path, "--mpi", "openmpi", "--time", "10m", "--setup", own)
    with held(cluster, tmp_path, sign="OMPI_COMM_WORLD_RANK") as ranks:
        assert {variable(rank, "OMPI_MCA_odls_base_sigkill_timeout") for rank in ranks} == {"10"}
        cluster.warn(number) if how == "warned" else cluster.call("bkill", number)
    finish(cluster)
    # What the ranks say while it ends them is lost.
    step = max(metrics(tmp_path / "my run's"))
    assert f"left with {code}; newest checkpoint: step-{step:08}" in said(tmp_path, number)
    assert how == "killed" or same(tmp_path / "my run's", finished)

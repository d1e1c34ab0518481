"""Jobs of a real Grid Engine: saved before the limit, queued again or followed, and finished."""

import re
import time

import pytest
from batchjob import STEPS, WORDS, held, is_asked, marks, same, uninterrupted
from gridengine import grid_engine, lacking

from conftest import distgpt, metrics, needs_mpi

pytestmark = marks(lacking())


@pytest.fixture(scope="module")
def cell():
    with grid_engine() as found:
        yield found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("finished") / "run")


def submit(cell, folder, *options, words=WORDS):
    """By `distgpt submit --submit`, with two ranks; returns the job's number."""
    head = ["submit", "--system", "sge", "--ranks-per-node", "2", "--submit", *options, "--", *words]
    result = distgpt(*head, "--out", "my run's", cwd=folder, env=cell.environ)
    assert result.returncode == 0, result.stderr
    return int(re.search(r"Your job(?:-array)? (\d+)", result.stdout)[1])


def stopped_at_the_limit(cell, folder):
    with held(cell, folder) as ranks:
        cell.wait_for(lambda: all(map(is_asked, ranks)))


def said(folder, number):
    return (folder / f"my-run-s-{number}.log").read_text()


@needs_mpi
def test_a_job_is_saved_before_its_limit_queued_again_and_ends_as_if_not_stopped(cell, finished, tmp_path):
    number = submit(cell, tmp_path, "--time", "60s")
    stopped_at_the_limit(cell, tmp_path)
    cell.wait_for(lambda: not cell.queued())
    log = said(tmp_path, number)
    assert "attempt 0 left with 75" in log and "attempt 1 left with 0" in log, log
    assert "2 ranks" in (tmp_path / f"my-run-s-{number}.1.log").read_text()
    assert same(tmp_path / "my run's", finished)


@needs_mpi
def test_a_successor_is_submitted_once_and_finishes_the_run(cell, finished, tmp_path):
    number = submit(cell, tmp_path, "--time", "60s", "--successor")
    stopped_at_the_limit(cell, tmp_path)
    cell.wait_for(lambda: not cell.queued())
    assert f"followed-{number}" in {path.name for path in (tmp_path / "my run's").iterdir()}
    assert sorted(path.name for path in tmp_path.glob("*.0.log")) == [
        f"my-run-s-{number}.0.log",
        f"my-run-s-{number + 1}.0.log",
    ]
    assert "attempt 0 left with 0" in said(tmp_path, number + 1) and same(tmp_path / "my run's", finished)


@needs_mpi
def test_a_job_that_is_deleted_has_saved_and_stays_so(cell, finished, tmp_path):
    number = submit(cell, tmp_path, "--time", "10m")
    with held(cell, tmp_path):
        cell.call("qdel", number)
    cell.wait_for(lambda: not cell.queued())
    assert "left with 75" in said(tmp_path, number)
    assert 0 < max(metrics(tmp_path / "my run's")) < STEPS
    time.sleep(3)
    assert not cell.queued()


@needs_mpi
def test_elements_of_an_array_have_directories_and_seeds_of_their_own(cell, finished, tmp_path):
    words = [*WORDS, "--seed", "$SGE_TASK_ID", "--steps", "10"]
    number = submit(cell, tmp_path, "--time", "10m", "--array", "1-2%1", words=words)
    cell.wait_for(lambda: not cell.queued())
    for element in ("1", "2"):
        assert "attempt 0 left with 0" in said(tmp_path, f"{number}.{element}")
    first, second = (tmp_path / "my run's" / element / "weights.safetensors" for element in "12")
    assert first.read_bytes() != second.read_bytes()

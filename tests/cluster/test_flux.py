"""Jobs of a real Flux: saved before the limit, followed by a successor, ended by hand, and finished."""

import json
import re
import time
from functools import partial

import batchjob
import pytest
from batchjob import STEPS, WORDS, marks, same, uninterrupted, variable
from fluxinstance import flux_instance, lacking

from conftest import distgpt, metrics, needs_mpi

pytestmark = marks(lacking())
held = partial(batchjob.held, sign="FLUX_TASK_RANK")


@pytest.fixture(scope="module")
def flux():
    with flux_instance() as found:
        yield found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("finished") / "run")


def submit(flux, folder, *options, words=WORDS):
    """By `distgpt submit --submit`; returns the numbers of the jobs."""
    head = ["submit", "--system", "flux", "--submit", *options, "--", *words, "--out", "my run's"]
    result = distgpt(*head, cwd=folder, env=flux.environ)
    assert result.returncode == 0, result.stderr
    return [f"f{number}" for number in re.findall(r"^ƒ(\w+)$", result.stdout, re.M)]


def said(folder, number, name="my-run-s"):
    return (folder / f"{name}-{number}.log").read_text()


def followed(folder):
    return [path.name for path in (folder / "my run's").glob("followed-*")]


@needs_mpi
def test_a_job_is_saved_before_its_limit_followed_once_and_ends_as_if_not_stopped(flux, finished, tmp_path):
    [number] = submit(flux, tmp_path, "--ranks-per-node", "2", "--time", "100s")
    with held(flux, tmp_path) as ranks:
        cores = {re.search(r"Cpus_allowed_list:\s+(\S+)", (rank / "status").read_text())[1] for rank in ranks}
        left = float(flux.call("job", "timeleft", number))
        end = float(variable(ranks[0], "DISTGPT_JOB_END"))
        assert 15 < time.time() + left - end < 25  # for a successor to be submitted
        flux.wait_for(lambda: time.time() > end - 2)
    assert len(cores) == 2  # a core for each
    flux.wait_for(lambda: not flux.queued())
    assert "attempt 0 left with 75" in said(tmp_path, number)
    assert "the time is up" in said(tmp_path, f"{number}.0")
    successor = said(tmp_path, number).split()[-1].replace("ƒ", "f")
    assert "attempt 0 left with 0" in said(tmp_path, successor)
    assert "2 ranks" in said(tmp_path, f"{successor}.0")
    assert followed(tmp_path) == [f"followed-{number}"] and same(tmp_path / "my run's", finished)
    summary = json.loads((tmp_path / "my run's" / "summary.json").read_text())
    assert summary["job"] == {"system": "Flux", "id": successor.replace("f", "ƒ", 1)}
    assert summary["launcher"] == "flux run"


@needs_mpi
def test_a_job_of_two_nodes_that_is_asked_to_save_is_followed(flux, finished, tmp_path):
    [number] = submit(flux, tmp_path, "--nodes", "2", "--time", "10m")
    with held(flux, tmp_path) as ranks:
        assert {variable(rank, "FLUX_TASK_LOCAL_ID") for rank in ranks} == {"0"}
        flux.call("proxy", number, "flux job kill -s USR1 $(flux job last)")
    flux.wait_for(lambda: not flux.queued())
    assert "attempt 0 left with 75" in said(tmp_path, number)
    assert followed(tmp_path) == [f"followed-{number}"] and same(tmp_path / "my run's", finished)


@needs_mpi
@pytest.mark.parametrize(
    ("nodes", "words", "code"),
    [
        (1, ["cancel", "{}"], 75),
        (2, ["proxy", "{}", "flux job kill -s TERM $(flux job last)"], 143),  # cancel would end a broker
    ],
)
def test_a_job_that_is_ended_by_hand_has_saved_and_stays_so(flux, nodes, words, code, tmp_path):
    shape = f"--nodes {nodes} --ranks-per-node {2 // nodes}".split()
    [number] = submit(flux, tmp_path, *shape, "--time", "10m")
    with held(flux, tmp_path):
        flux.call(*(word.format(number) for word in words))
    flux.wait_for(lambda: not flux.queued())
    assert f"attempt 0 left with {code}; newest checkpoint: step-" in said(tmp_path, number)
    assert 0 < max(metrics(tmp_path / "my run's")) < STEPS and not followed(tmp_path)


@needs_mpi
def test_each_element_of_an_array_is_a_job_with_a_directory_and_a_seed_of_its_own(flux, tmp_path):
    options = ["--ranks-per-node", "2", "--time", "10m", "--array", "1-2", "--name", "mine"]
    options += ["--setup", "export SET='b c'", "--prefix", "env A=B", "--directive", "--urgency=20"]
    words = [*WORDS, "--seed", "$ELEMENT", "--steps", "10"]
    numbers = submit(flux, tmp_path, *options, words=words)
    flux.wait_for(lambda: not flux.queued())
    assert len(numbers) == 2
    for number in numbers:
        assert "attempt 0 left with 0" in said(tmp_path, number, "mine")
        assert flux.call("jobs", "-n", "-o", "{name} {urgency}", number).split() == ["mine", "20"]
    first, second = (tmp_path / "my run's" / element / "weights.safetensors" for element in "12")
    assert first.read_bytes() != second.read_bytes()


def test_more_ranks_than_gpus_have_all_gpus_of_their_node(tmp_path):
    report = """sh -c 'echo $FLUX_TASK_RANK $CUDA_VISIBLE_DEVICES >>"gpus $FLUX_TASK_RANK"'"""
    options = ["--nodes", "2", "--ranks-per-node", "4", "--cpus-per-task", "1", "--gpus-per-node", "2"]
    with flux_instance(pretended="--cores=0-3 --gpus=0-1") as flux:
        submit(flux, tmp_path, *options, "--mpi", "simple", "--time", "10m", "--prefix", report)
        flux.wait_for(lambda: not flux.queued())
    seen = sorted(path.read_text().split() for path in tmp_path.glob("gpus *"))
    assert seen == [[str(rank), "0,1"] for rank in range(8)]

"""Two hosts with nothing but a slow cable between them: what is measured there has to know of the cable."""

import json
import os
import sys
from pathlib import Path

import pytest
from twohosts import Unavailable, shaped_link

from distgpt.jobs.processes import run
from distgpt.measure.jobs import unsteered

pytestmark = pytest.mark.slow
SCALING = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"
BITS, MICROSECONDS = 1e9, 200
MODEL = "--n-layer 1 --n-head 2 --n-embd 128 --seq-len 16 --batch-size 2 --tokenizer byte --steps 8"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What scaling.py found on one rank here and two over the cable."""
    folder = tmp_path_factory.mktemp("link")
    try:
        with shaped_link(folder, BITS, MICROSECONDS) as (mpirun, hosts):
            words = ["--weak", "--threads", "1", "--seconds", "1", "--predict", "64", "--json"]
            link = ["--launcher", mpirun, "--hostfile", hosts, "--out", folder / "out"]
            result = run([sys.executable, SCALING, *MODEL.split(), *words, *link], env=unsteered())
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert result.code == 0, result.errors
    return json.loads(result.output)


def wire(size):
    """Seconds that the cable is busy with so many bytes."""
    return 8 * size / BITS


def test_no_sum_is_faster_than_the_cable(found):
    summed = found["allreduce"]
    assert (summed["ranks"], summed["nodes"], summed["ranks_per_node"]) == (2, 2, 1)
    assert {8, found["gradient_bytes"]} <= {row["bytes"] for row in summed["rows"] + summed["not_measured"]}
    for row in summed["rows"]:
        assert row["min_seconds"] >= max(wire(row["bytes"]), MICROSECONDS * 1e-6)
        assert row["seconds"] < 50 * max(wire(row["bytes"]), 1e-2)


def test_the_model_knows_that_steps_over_the_cable_take_longer(found):
    """How close it comes is told by benchmarks/shaped_link.py: a busy machine says nothing about it."""
    one, two = found["measured"]
    least = wire(found["gradient_bytes"])
    assert least > 0.005  # so that it can be told from the rest
    assert two["step_s"] >= least + MICROSECONDS * 1e-6
    assert two["predicted_step_s"] >= one["step_s"] + least
    assert 0.1 < two["predicted_step_s"] / two["step_s"] < 10
    assert found["gradient_bytes"] in {row["bytes"] for row in found["allreduce"]["rows"]}
    assert found["model"]["regimes"][-1]["beta"] >= 0.8 * 8 / BITS  # a slope through few noisy points
    (far,) = found["predicted"]
    assert far["allreduce_s"] > 1.5 * wire(found["gradient_bytes"])  # scatter and gather: nearly twice


def test_what_shares_cores_is_told_by_the_hosts_themselves(found):
    """Not by the options: these are two hosts, with one rank each."""
    assert not found["measured"][1]["shares_cores"] and found["cores"] == len(os.sched_getaffinity(0))

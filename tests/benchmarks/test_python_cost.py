"""The step whose kernels do nothing takes Python's time, and none of the kernels'."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "python_cost.py"


def measured(path, *words):
    command = [sys.executable, BENCHMARK, "--presets", "tiny", "--threads", "1", "--steps", "2", "--out", path]
    subprocess.run([*command, *words], check=True, timeout=200)
    return json.loads(path.read_text())


@pytest.mark.ci
def test_what_is_left_of_a_step_without_its_kernels_is_python(tmp_path):
    recorded, by_python = measured(tmp_path / "a"), measured(tmp_path / "b", "--floor-only", "--by-python")
    (row,) = recorded["rows"]
    assert recorded["processor"] and not recorded["by_python"] and by_python["by_python"]
    assert 0 < row["share"] < 0.5 and row["ms"] < row["kernels_ms"]
    # Of calls, since times of so few milliseconds swing on a busy machine.
    assert 2 * row["calls"] < by_python["rows"][0]["calls"]

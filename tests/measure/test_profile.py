"""Steps under the profiler: nothing is missing, nothing changes, nothing stays behind. The command."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.measure.profile import operations as ops
from distgpt.measure.profile import session
from distgpt.measure.profile.session import Profiler, as_text, of_rank, result
from profiling import job, profiled

from conftest import SMALL, distgpt, inside, needs_mpi, refused


def test_profiling_changes_no_bit_and_leaves_nothing_behind():
    weights = []
    for watched in (True, False):
        step, batches = job(2)
        if watched:
            assert len(list(Profiler(step).steps(batches, 3))) == 5
        else:
            for number in range(5):
                step.launch(number, batches).wait()
        assert not set(vars(step.model.kernels)) & {*ops.OPERATIONS, "each", "run_together"}
        weights.append(step.model.weights.flat.copy())
    np.testing.assert_array_equal(*weights)
    step.optimizer.apply = lambda: 1 / 0  # a step that fails leaves nothing behind either
    with pytest.raises(ZeroDivisionError):
        profiled(step, batches, warm_up=0)
    assert "linear" not in vars(step.model.kernels) and "fill" not in vars(batches)


ABOUT = {"stage": "mpi", "ranks": 2, "threads": 2, "gpu": False, "dtype": "float32", "parameters": 7}
ABOUT |= {"tokens_per_step": 100, "matmul": ""}


def test_ranks_are_summed_and_averaged():
    profiler, _ = profiled(*job())
    one = of_rank(profiler, 0, 100.0)
    seconds, *others = one["times"]
    slow = {**one, "rank": 1, "step_s": 3 * one["step_s"], "times": [[3 * s for s in seconds], *others]}
    found = result([one, slow], ABOUT)
    own, other = found["per_rank"]
    assert found["step_s"] == pytest.approx(2 * one["step_s"])
    for mean, first, second in zip(found["rows"], own["rows"], other["rows"], strict=True):
        assert mean["row"] == first["row"] == second["row"]
        assert mean["ms"] == pytest.approx(2 * first["ms"]) and first["ms"] == pytest.approx(second["ms"] / 3)
        assert mean["share"] == pytest.approx(first["share"])
    assert own["rows"][0]["of_peak"] == pytest.approx(own["rows"][0]["gflops"] / 100)
    text = as_text(found)
    assert max(map(len, text.splitlines())) <= 100 and "2 ranks" in text and "2 threads" in text
    # One with as much work a worker, and more workers, changes the mean by nothing.
    wide = {**one, "rank": 1, "workers": 3}
    for ranks in ([one, wide], [wide, one]):
        found = result(ranks, ABOUT)
        for mean, alone in zip(found["rows"], own["rows"], strict=True):
            assert mean["ms"] == pytest.approx(alone["ms"])


class Counted(CpuKernels):
    """Every matmul is over in an instant of its own clock."""

    def __init__(self, seconds):
        super().__init__("float32", 2)
        self.seconds, self.sizes, self.at = seconds, [], 0.0

    def linear(self, y, x, wb):
        assert np.isfinite(x).all() and x.any()
        self.sizes.append(len(x))
        self.at += self.seconds * (len(x) / 512) ** 3


@pytest.mark.parametrize("product", [5e-5, 3e-3])
def test_the_peak_is_counted_right_and_slow_ones_stop_at_small_sizes(product, monkeypatch):
    kernels = Counted(product)
    monkeypatch.setattr(session, "SIDES", (512, 1024, 2048))
    monkeypatch.setattr(session.time, "perf_counter", lambda: kernels.at)
    assert session.peak_gflops(kernels) == pytest.approx(2 * 512**3 / product / 1e9, rel=1e-3)
    assert tuple(dict.fromkeys(kernels.sizes)) == session.SIDES and kernels.at < 2 * session.SECONDS


# The command

# The peak is measured, but not for long.
SHORT = """import distgpt.measure.profile.session as session
session.SECONDS = 0.05
from distgpt.commands.cli import main
main()"""
PROGRAM = {"program": [sys.executable, "-c", SHORT], "cold": False}


def read_profile(folder, ranks, steps):
    found = json.loads((folder / "profile.json").read_text())
    assert (found["ranks"], found["steps"], len(found["per_rank"])) == (ranks, steps, ranks)
    for profile in (found, *found["per_rank"]):
        assert profile["rows"][-1]["row"] == ops.BETWEEN
        assert profile["rows"][-1]["share"] >= -0.03  # the others claim no more than there was
        assert profile["peak_gflops"] > 0
    assert "versions" in found["environment"]
    return found


@pytest.mark.ci
def test_profile_tells_and_saves(tmp_path):
    words = [*SMALL, "--threads", "2", "--steps", "3", "--out", "found"]
    done = distgpt("profile", *words, cwd=tmp_path, **PROGRAM)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / "found", ranks=1, steps=3)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["found/profile.json"]
    for row in found["rows"]:
        assert row["row"] in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "step 5 of 5" in done.stderr and "Allreduce" not in done.stdout


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_profile_of_two_ranks(tmp_path):
    done = distgpt(*("profile", *SMALL, "--steps", "3", "--stage", "mpi", "--out", tmp_path), ranks=2, **PROGRAM)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path, ranks=2, steps=3)
    for profile in (found, *found["per_rank"]):
        named = {row["row"]: row for row in profile["rows"]}
        assert named[ops.WAIT]["calls"] == named[ops.TRANSFER]["calls"] == 1
    assert "Allreduce: transfer" in done.stdout


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        result = inside("profile", *SMALL, "--out", folder)
        refused(result, 74, folder.name)
        assert "step 1" not in result.stderr

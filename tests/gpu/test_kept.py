"""What was found fastest is kept: a second start times nothing, and takes nothing that is not for it."""

from dataclasses import replace

import numpy as np
import pytest
from devices import gpu, gpu_train, needs_the_processor  # noqa: F401
from distgpt.core.base.caches import read_checked, write_checked
from distgpt.gpu import compiling
from distgpt.gpu.compiling import Kept
from distgpt.gpu.device import CupyDevice
from fakecupy import FakeCupy
from test_cublaslt import ANY, BREAKING, IN_PARTS, PLAIN, UNFIT, WIDEST, Bench, compute, operands

KIND = replace(PLAIN, m=64, n=64, k=64)
SUMMED = replace(KIND, accumulate=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distgpt" / "kernels"


def start(facts=("H100",), **how):
    """What a new process has: nothing chosen yet."""
    bench = Bench(**how)
    bench.kept = Kept(facts)
    return bench


def files(folder):
    return sorted(folder.glob("*.choice"))


@pytest.mark.parametrize("kind", [KIND, SUMMED])
def test_a_second_start_times_nothing_and_takes_the_same(folder, kind):
    first, second = start(takes={IN_PARTS: 0.5}), start(takes={ANY: 0.5})
    compute(first.matmuls, kind)
    assert first.timed and len(files(folder)) == 1
    compute(second.matmuls, kind)
    assert (second.timed, second.stand_in.algorithm) == ([], IN_PARTS)
    assert second.matmuls.chosen() == first.matmuls.chosen()


def test_other_gpus_libraries_arithmetic_kinds_and_code_time_for_themselves(folder, monkeypatch):
    compute(start().matmuls, KIND)
    newer = start()
    newer.matmuls.about = (newer.lt.version + 1, False)
    for other in (start(("H200",)), newer, start(tf32=True)):
        other.matmuls.run(KIND, **operands(KIND))
        assert other.timed
    smaller = start()
    compute(smaller.matmuls, replace(KIND, m=32))
    assert smaller.timed
    monkeypatch.setattr(compiling, "_code", lambda: "another")
    changed = start()
    compute(changed.matmuls, KIND)
    assert changed.timed and len(files(folder)) == 6


def damage(path, content):
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def of_algorithm(number, mark=None):
    def replaced(path, content):
        words = np.frombuffer(content, np.uint64).copy()
        words[7], words[0] = number, words[0] if mark is None else mark
        write_checked(path, words.tobytes())

    return replaced


@pytest.mark.parametrize(
    "spoil",
    [
        damage,
        lambda path, content: path.write_bytes(b""),
        lambda path, content: write_checked(path, content[:-1]),
        of_algorithm(99),
        of_algorithm(ANY, mark=1),
        of_algorithm(UNFIT),
        of_algorithm(BREAKING),  # the library takes it for a good one, and cannot start it
        of_algorithm(1),  # of more workspace than there is
    ],
)
@pytest.mark.parametrize("kind", [KIND, SUMMED])
def test_what_is_damaged_or_not_for_this_library_is_timed_anew_and_replaced(folder, spoil, kind):
    compute(start(takes={WIDEST: 0.5}).matmuls, kind)
    (path,) = files(folder)
    right = read_checked(path)
    spoil(path, right)
    assert read_checked(path) != right
    again = start(takes={WIDEST: 0.5})
    compute(again.matmuls, kind)
    assert again.timed and again.stand_in.algorithm == WIDEST
    assert read_checked(path) == right


def test_determinism_and_a_cache_that_cannot_be_written_keep_nothing(folder, monkeypatch):
    compute(start(deterministic=True).matmuls, KIND)
    assert files(folder) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    for _ in range(2):
        one = start()
        compute(one.matmuls, KIND)
        assert one.timed


def test_everything_can_be_timed_anew(folder, monkeypatch):
    compute(start(takes={ANY: 0.5}).matmuls, KIND)
    monkeypatch.setenv(compiling.TUNE_ANEW, "1")
    compute(start(takes={IN_PARTS: 0.5}).matmuls, KIND)
    monkeypatch.delenv(compiling.TUNE_ANEW)
    last = start()
    compute(last.matmuls, KIND)
    assert (last.timed, last.stand_in.algorithm) == ([], IN_PARTS)


def ways(device):
    """Let it choose between two, of which the second is faster; return what ran."""
    ran = []
    device.times = lambda works: [work() or 2.0 - i for i, work in enumerate(works)]
    device.fastest(KIND, [lambda: ran.append("fused"), lambda: ran.append("apart")])
    return ran


def test_so_is_the_faster_of_two_ways(folder):
    def opened(versions, **about):
        device = CupyDevice(0, xp=FakeCupy(**about))
        if versions:
            device.keep_choices(*versions)
        return device

    assert ways(opened([1])) == ["fused", "apart", "apart"]
    assert ways(opened([1])) == ["apart"]
    for other in (opened([2]), opened([1], capability=(8, 0)), opened([1], total=4000), opened(None)):
        assert ways(other) == ["fused", "apart", "apart"]
    for path in files(folder):
        write_checked(path, b"\2")
    assert ways(opened([1])) == ["fused", "apart", "apart"]


@pytest.mark.ci
@needs_the_processor
def test_a_run_times_nothing_the_second_time_and_learns_the_same(folder, gpu, tmp_path, monkeypatch):
    timed, times = [], CupyDevice.times
    monkeypatch.setattr(CupyDevice, "times", lambda *args: timed.append(1) or times(*args))
    counts, losses = [], []
    for name in ("a", "b"):
        gpu_train(gpu, tmp_path / name, "--steps", "3", "--n-layer", "1")
        counts.append(len(timed))
        losses.append((tmp_path / name / "metrics.jsonl").read_text().count("loss"))
    assert counts[0] > 5 and counts[1] == counts[0]
    assert losses[0] == losses[1] > 0

from dataclasses import replace

import numpy as np
import pytest
from devices import gpu, gpu_train, needs_the_processor  # noqa: F401
from distgpt.core.base.caches import read_checked, write_checked
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import compiling
from distgpt.gpu.compiling import TuningCache
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.matmul import LtMatmul, share_autotuning
from fakecupy import FakeCupy
from hostgpu import host_lt
from test_cublaslt import ANY, BREAKING, IN_PARTS, LARGE, TOO_MUCH_WORKSPACE, UNFIT, WIDEST, Bench, compute, operands
from test_cuda_model import SMALL, TRAIN, training
from threadranks import on_all_ranks

SUMMED, OTHER = replace(LARGE, accumulate=True), replace(LARGE, k=32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distgpt" / "kernels"


def start(facts=("H100",), **how):
    bench = Bench(**how)
    bench.kept = TuningCache(facts)
    return bench


def found(bench, kind=LARGE):
    compute(bench.matmuls, kind)
    return bench.timed, bench.stand_in.algorithm


@pytest.mark.parametrize("kind", [LARGE, SUMMED])
def test_second_start_reuses_choices(folder, kind, monkeypatch):
    first, second = start(takes={IN_PARTS: 0.5}), start(takes={ANY: 0.5})
    assert found(first, kind)[0] and len(list(folder.glob("*.choice"))) == 1
    assert found(second, kind) == ([], IN_PARTS) and second.matmuls.chosen() == first.matmuls.chosen()
    monkeypatch.setenv(compiling.TUNE_ANEW, "1")
    assert found(start(takes={ANY: 0.5}), kind)[1] == ANY
    monkeypatch.delenv(compiling.TUNE_ANEW)
    assert found(start(), kind) == ([], ANY)


def test_choices_depend_on_gpu_library_and_code(folder, monkeypatch):
    newer = start()
    newer.matmuls.about = (newer.lt.version + 1, False)
    for other in (start(), start(("H200",)), newer, start(tf32=True)):
        other.matmuls.run(LARGE, **operands(LARGE))
        assert other.timed
    assert found(start(), replace(LARGE, m=32))[0]
    monkeypatch.setattr(compiling, "_code", lambda: "another")
    assert found(start())[0] and len(list(folder.glob("*.choice"))) == 6


def of_algorithm(number, mark=None):
    def replaced(path, content):
        words = np.frombuffer(content, np.uint64).copy()
        words[7], words[0] = number, words[0] if mark is None else mark
        write_checked(path, words.tobytes())

    return replaced


@pytest.mark.parametrize("spoil", [
    lambda path, content: path.write_bytes(path.read_bytes()[:-1] + b"\1"), lambda path, content: path.write_bytes(b""),
    lambda path, content: write_checked(path, content[:-1]), of_algorithm(99), of_algorithm(ANY, mark=1),
    *map(of_algorithm, (UNFIT, BREAKING, TOO_MUCH_WORKSPACE)),  # BREAKING is accepted, but fails when started
])  # fmt: skip
@pytest.mark.parametrize("kind", [LARGE, SUMMED])
def test_unusable_choice_is_timed_again(folder, spoil, kind):
    found(start(takes={WIDEST: 0.5}), kind)
    (path,) = folder.glob("*.choice")
    right = read_checked(path)
    spoil(path, right)
    assert read_checked(path) != right
    timed, taken = found(start(takes={WIDEST: 0.5}), kind)
    assert timed and taken == WIDEST and read_checked(path) == right


def test_deterministic_or_unwritable_cache_keeps_nothing(folder, monkeypatch):
    found(start(deterministic=True))
    assert not list(folder.glob("*.choice"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    for _ in range(2):
        assert found(start())[0]


def test_faster_way_is_kept(folder):
    def ways(*versions, **about):
        """Choose between two ways, the second faster; return the ways that ran."""
        ran, device = [], CupyDevice(0, xp=FakeCupy(**about))
        if versions:
            device.keep_choices(*versions)
        device.times = lambda works: [work() or 2.0 - i for i, work in enumerate(works)]
        device.fastest(LARGE, [lambda: ran.append("fused"), lambda: ran.append("apart")])
        return ran

    anew = ["fused", "apart", "apart"]
    assert ways(1) == anew and ways(1) == ["apart"]
    assert ways(2) == ways(1, capability=(8, 0)) == ways(1, total=4000) == ways() == anew
    for path in folder.glob("*.choice"):
        write_checked(path, b"\2")
    assert ways(1) == anew


@pytest.mark.ci
@needs_the_processor
def test_second_run_times_nothing(folder, gpu, tmp_path, monkeypatch):
    timed, times, counts = [], CupyDevice.times, []
    monkeypatch.setattr(CupyDevice, "times", lambda *args: timed.append(1) or times(*args))
    for name in ("a", "b"):
        gpu_train(gpu, tmp_path / name, "--steps", "1", "--n-layer", "1", "--seq-len", "8")
        counts.append(len(timed))
    assert counts[0] > 5 and counts[1] == counts[0]


class Gpu:
    """A rank's GPU with a fastest algorithm and a recorded matmul."""

    def __init__(self, favourite, name="Fake GPU", kinds=(LARGE,), way=0, tf32=False):
        self.device, self.favourite = CupyDevice(0, xp=FakeCupy()), favourite
        self.device.name = name
        lt = host_lt(self.device.xp)
        self.matmuls, self.stand_in = LtMatmul(lt, self.device, tf32), lt.library
        self.arrays = {
            kind: [self.device.zeros(s, np.dtype(np.float32)) for s in ((64, 64), (64, kind.k), (kind.k, 64))]
            for kind in kinds
        }
        self.device.times = lambda works: [float(way != i) for i in range(2)]
        for kind in kinds:
            self.device.fastest(kind, [lambda: None, lambda: None])
        self.device.times, self.recorded = self.times, 0
        self.work = self.device.record(self._work)
        self.ran()

    def _work(self):
        self.recorded += self.device.recording
        for kind, arrays in self.arrays.items():
            self.matmuls.run(kind, *arrays)

    def times(self, works):
        seconds = []
        for work in works:
            work()
            self.device.synchronize()
            seconds.append(float(self.stand_in.algorithm != self.favourite))
        return seconds

    def ran(self):
        """Return the algorithm of the recorded work, and the number of recordings."""
        for _ in range(2):
            self.work()
        self.device.synchronize()
        return self.stand_in.algorithm, self.recorded


def after_agreement(*gpus):
    """Share the choices; return `ran` of each GPU."""

    def act(comm):
        gpu = gpus[comm.rank]
        share_autotuning(lambda own: gather_bytes(comm, own), gpu.device, gpu.matmuls)

    on_all_ranks(len(gpus), act)
    return [gpu.ran() for gpu in gpus]


def test_equal_gpus_share_the_first_algorithm():
    gpus = [Gpu(IN_PARTS), Gpu(WIDEST, name="Older GPU"), Gpu(ANY), Gpu(ANY, name="Older GPU"), Gpu(IN_PARTS)]
    gpus += [Gpu(ANY, tf32=True), Gpu(WIDEST)]
    gpus[-1].matmuls.about = (1, False)
    wanted = [(IN_PARTS, 1), (WIDEST, 1), (IN_PARTS, 2), (WIDEST, 2), (IN_PARTS, 1), (ANY, 1), (WIDEST, 1)]
    assert after_agreement(*gpus) == wanted and after_agreement(*gpus) == wanted


def test_kinds_the_first_has_not_timed_are_chosen_per_gpu():
    first, second = Gpu(WIDEST), Gpu(ANY, kinds=(LARGE, OTHER))
    assert after_agreement(first, second)[1] == (ANY, 2)  # the other kind comes last
    own, more = first.matmuls.chosen(), second.matmuls.chosen()
    assert (len(own), len(more)) == (1, 2) and own.items() <= more.items()
    # An unknown algorithm is not adopted.
    assert not first.matmuls.adopt(dict.fromkeys(own, "00" * 64)) and first.matmuls.chosen() == own


def test_way_of_the_first_is_shared():
    gpus = [Gpu(ANY, way=1), Gpu(ANY, way=0, kinds=(LARGE, OTHER)), Gpu(ANY, way=0, name="Older GPU")]
    assert [recorded for _, recorded in after_agreement(*gpus)] == [1, 2, 1]
    assert [gpu.device.choices for gpu in gpus] == [{LARGE: 1}, {LARGE: 1, OTHER: 0}, {LARGE: 0}]


def test_run_shares_choices_after_its_first_step(monkeypatch):
    asked = []
    monkeypatch.setattr(Kernels, "agree", lambda self, gather: asked.append(gather(b"own")))
    for steps in (1, 3):
        asked.clear()
        training(Kernels("float64"), SMALL, TRAIN, count=steps)
        assert asked == [[b"own"]] * (steps > 1)

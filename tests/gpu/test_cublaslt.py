import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from devices import gpu, gpu_train, needs_the_processor  # noqa: F401
from distgpt.core.base.caches import read_checked, write_checked
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.ops.kernels import Kernels
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.gpu import compiling
from distgpt.gpu.compiling import TuningCache
from distgpt.gpu.cublaslt import CublasLt, Epilogue, LtError
from distgpt.gpu.device import STORAGE, CupyDevice
from distgpt.gpu.matmul import LtMatmul, Matmul, share_autotuning
from fakecupy import FakeCupy
from hostgpu import host_lt
from hostlt import ALIGNMENTS, HostLt
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_model import SMALL, TRAIN, training
from threadranks import on_all_ranks

TYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
PLAIN = Matmul(6, 16, 5, False, False, "float32", "float32")
LARGE = replace(PLAIN, m=64, n=64, k=64)
# Algorithms of the host's implementation, see ALGORITHMS there.
IN_PLACE, TOO_MUCH_WORKSPACE, UNFIT, WIDEST, IN_PARTS, BREAKING, ANY, ROUNDED_PARTS = range(8)


def empty(shape, stored, offset=0):
    """Return an array of NaN at a multiple of 256 bytes plus the offset in numbers."""
    dtype = STORAGE[stored]
    room = np.full(math.prod(shape) * dtype.itemsize + 1024, 0xFF, np.uint8)
    start = -room.ctypes.data % 256 + offset * dtype.itemsize
    return room[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def put(numbers, stored, offset=0):
    array = empty(numbers.shape, stored, offset)
    array[...] = to_bfloat16(numbers) if stored == "bfloat16" else numbers
    return array


def numbers(array):
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def random(shape, stored, seed, offset=0):
    return put(np.random.default_rng(seed).standard_normal(shape), stored, offset)


def operands(kind, offset=0):
    """Return arrays for `run`; outputs hold NaN. `offset` shifts a from an aligned address."""
    m, n, k = kind.m, kind.n, kind.k
    out, row = ((kind.batch,) * (kind.batch > 1) + (m, n), n), (k, m) if kind.transpose_a else (m, k)
    many = out[0][:-2]
    wide = random((*many, row[0], kind.stride or row[1]), kind.in_type, 2, offset)
    arrays = {
        "out": random(out[0], kind.out_type, 1) if kind.accumulate else empty(out[0], kind.out_type),
        "a": wide[..., : row[1]],
        "b": random((*many, *((n, k) if kind.transpose_b else (k, n))), kind.in_type, 3),
    }
    if kind.onto:
        arrays["onto"] = random(out[0], kind.out_type, 6)
    if kind.epilogue == "bias" or kind.has_bias:
        arrays["bias"] = random((n,), kind.out_type, 4)
    if kind.epilogue == "column_sums":
        arrays["bias"] = empty((m,), kind.out_type)
    if kind.epilogue in ("gelu", "dgelu"):
        arrays["aux"] = (empty if kind.epilogue == "gelu" else random)((m, n), kind.out_type, 0)
    return arrays


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def expected(kind, arrays, factors):
    after = {name: numbers(array) for name, array in arrays.items()}
    a = after["a"].swapaxes(-1, -2) if kind.transpose_a else after["a"]
    b = after["b"].swapaxes(-1, -2) if kind.transpose_b else after["b"]
    alpha, beta = factors or (1.0, 1.0)
    y = alpha * (a @ b)
    if kind.accumulate or kind.onto:
        y += beta * after["onto" if kind.onto else "out"]
    if kind.epilogue == "bias" or kind.has_bias:
        y += after["bias"]
    if kind.epilogue == "gelu":
        after["aux"], y = y, _gelu(y)
    if kind.epilogue == "dgelu":
        y *= (_gelu(after["aux"] + 1e-6) - _gelu(after["aux"] - 1e-6)) / 2e-6
    if kind.epilogue == "column_sums":
        after["bias"] = a.sum(axis=-1)
    return after | {"out": y}


def compute(matmuls, kind, offset=0, factors=None):
    arrays = operands(kind, offset)
    right = expected(kind, arrays, factors)
    matmuls.run(kind, **arrays, factors=factors)
    # One rounding to the type of out, of intermediate sums up to a few times as large.
    relative = {"bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-8}[kind.out_type]
    near = relative * (8 if factors else 1)
    for name, array in arrays.items():
        np.testing.assert_allclose(numbers(array), right[name], rtol=relative, atol=near, err_msg=name)


class Bench:
    """`LtMatmul` on NumPy arrays. This is its device, with given times of algorithms."""

    capability = (8, 0)
    stream = SimpleNamespace(ptr=0x5EA)
    zeros = staticmethod(np.zeros)

    def __init__(self, takes=None, deterministic=False, tf32=False):
        self.takes, self.deterministic = takes or {}, deterministic
        self.timed, self.restored, self.kept = [], 0, TuningCache(None)
        self.stand_in = HostLt()
        self.lt = CublasLt(self.stand_in)
        self.matmuls = LtMatmul(self.lt, self, tf32)

    def times(self, works):
        first = len(self.timed)
        for work in works:
            work()
            self.timed.append(self.stand_in.algorithm)
        return [self.takes.get(algorithm, 1.0) for algorithm in self.timed[first:]]

    def keep(self, array, work):
        self.restored += 1
        saved = array.copy()
        work()
        array[...] = saved

    def check(self):
        """Check that no call was invalid and no search object is left."""
        assert self.stand_in.invalid == 0 and dict not in map(type, self.stand_in.live.values())


@pytest.fixture
def bench():
    """Return a function that makes benches; check them at the end."""
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.check()


FLAGS = (False, True)
KINDS = [
    Matmul(m, n, k, ta, tb, *types, epilogue, *adds, onto, stride, batch)
    for types, epilogue, onto, stride, batch in product(
        TYPES, ("none", "bias", "gelu", "dgelu", "column_sums"), FLAGS, (0, 12), (1, 3)
    )
    if batch == 1 or (epilogue == "none" and not stride)
    for adds in product({False, not onto}, {False, epilogue == "gelu"})
    for m, n, k, ta, tb in product((1, 7), (1, 8, 13, 40), (1, 9), FLAGS, FLAGS)
]


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), factors=st.sampled_from([None, (1.0, 8.25), (-1.5, 0.5)]))
def test_matmuls_match_numpy(kind, factors):
    epilogue, plain = kind.epilogue, kind.epilogue == "none"
    if factors := plain and factors:
        factors = factors[0], factors[1] * (kind.accumulate or kind.onto)
    possible = kind.n % 8 == 0 or "gelu" not in epilogue
    possible &= not kind.accumulate or epilogue in ("none", "column_sums")
    possible &= not kind.onto or epilogue in ("none", "bias")
    one = Bench()
    assert one.matmuls.can(kind) == possible
    if possible:
        compute(one.matmuls, kind, factors=factors)
    one.check()


FASTER = {TOO_MUCH_WORKSPACE: 0.1, UNFIT: 0.1, BREAKING: 0.1}
IN_FLOAT32 = [IN_PLACE, WIDEST, IN_PARTS, ANY, ROUNDED_PARTS]
ROUNDED = replace(LARGE, n=128, k=128, in_type="bfloat16", out_type="bfloat16")


@pytest.mark.parametrize(
    ("kind", "takes", "tried", "fastest"),
    [
        *((LARGE, {**FASTER, each: 0.5}, IN_FLOAT32, each) for each in IN_FLOAT32),
        # Algorithms that sum in bfloat16 are never used.
        (ROUNDED, {IN_PLACE: 0.1, ROUNDED_PARTS: 0.1, ANY: 0.5}, [WIDEST, IN_PARTS, ANY], ANY),
    ],
)
def test_fastest_algorithm_is_searched_once(kind, takes, tried, fastest, bench):
    one = bench(takes=takes)
    compute(one.matmuls, kind)
    assert (one.timed, one.stand_in.algorithm) == (tried, fastest)
    searches, started = one.stand_in.searches, one.stand_in.started
    for _ in range(3):
        compute(one.matmuls, replace(kind))
    assert one.stand_in.algorithm == fastest
    assert (one.stand_in.searches, one.stand_in.started) == (searches, started + 3)


def test_deterministic_takes_first_algorithm_untimed(bench):
    one = bench(deterministic=True, takes={ANY: 0.1, IN_PLACE: 0.1})
    compute(one.matmuls, LARGE)
    assert one.stand_in.algorithm == WIDEST and one.timed == []


def test_timing_accumulates_only_once(bench):
    one = bench()
    compute(one.matmuls, replace(PLAIN, accumulate=True))
    assert one.restored == 1 and len(one.timed) > 1
    compute(one.matmuls, replace(PLAIN, epilogue="column_sums"))
    assert one.restored == 1


def test_alignment_selects_algorithms(bench):
    one = bench(takes={WIDEST: 0.1, IN_PARTS: 0.2})
    odd = replace(LARGE, k=63)  # odd rows at aligned addresses
    for offset, kind, fit in (
        *((1, LARGE, (ANY, ROUNDED_PARTS)), (4, LARGE, (IN_PARTS,)), (0, LARGE, (WIDEST,))),
        *((1, LARGE, (ANY, ROUNDED_PARTS)), (0, odd, (ANY, ROUNDED_PARTS))),
    ):
        compute(one.matmuls, kind, offset)
        assert one.stand_in.algorithm in fit, (offset, kind)
    assert one.timed[:2] == [ANY, ROUNDED_PARTS]
    assert [one.stand_in.preference[of] for of in ALIGNMENTS[:2]] == [256, 4]  # the library's A is our b


def test_unsupported_matmul_is_named(bench):
    one = bench()
    one.stand_in.refused, matmuls = Epilogue.DGELU, one.matmuls
    unknown, mixed = replace(PLAIN, epilogue="dgelu"), replace(PLAIN, in_type="float64")
    assert not matmuls.can(unknown) and matmuls.can(replace(PLAIN, epilogue="gelu"))
    for kind, words in ((unknown, "float32.*dgelu"), (mixed, "float64.*float32")):
        with pytest.raises(LtError, match=rf"m=6, n=16, k=5.*{words}.*NOT_SUPPORTED"):
            matmuls.run(kind, **operands(kind))


def test_tf32_is_used_only_if_requested(bench):
    third, one = np.full((1, 1), np.float32(1 / 3)), np.ones((1, 1))
    results = []
    for tf32 in (False, True):
        out = empty((1, 1), "float32")
        matmuls = bench(tf32=tf32).matmuls
        matmuls.run(replace(PLAIN, m=1, n=1, k=1), out, put(third, "float32"), put(one, "float32"))
        results.append(out[0, 0])
    assert results == [third[0, 0], np.float32(1365 / 4096)]  # eleven bits
    for types in TYPES[1::2]:
        compute(bench(tf32=True).matmuls, Matmul(3, 5, 4, False, True, *types))


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

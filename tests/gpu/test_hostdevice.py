"""The host device: memory, arguments, launches, matmuls, and work that is recorded and repeated."""

import itertools

import hostdevice
import numpy as np
import pytest
from hostbuild import COMPILER, BuildError
from hostdevice import HostDevice, HostDeviceError, Launch
from hostmatmul import HostMatmul
from matmul_cases import EPILOGUES, TYPES, agree, expected, operands

from distgpt.gpu.api import Matmul

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

KERNELS = """
extern "C" __global__ void write_at(float* p, int at) { if (threadIdx.x == 0) p[at] = 1; }
extern "C" __global__ void typed(unsigned short* a, const float* b, const double* c, int i, double d) {
    if (threadIdx.x == 0 && b && c) a[0] = (unsigned short)(i + d);
}
extern "C" __global__ void floating(float* a, float x) { a[0] = x; }
"""


@pytest.fixture
def device():
    return HostDevice(texts={"kernels": KERNELS})


def start(device, kernel, *args, grid=(1,), block=(32,), shared=0):
    device.launch("kernels", kernel, (), grid, block, args, shared)


def array(device, host):
    host = np.asarray(host)
    on_device = device.zeros(host.shape, host.dtype)
    device.upload(on_device, host)
    return on_device


def test_arguments_are_numbers_arrays_and_null_pointers(device):
    a, b, c = (device.zeros((4,), dtype) for dtype in (np.uint16, np.float32, np.float64))
    start(device, "typed", a, b, c, 3, 4.5)
    assert device.download(a)[0] == 7
    start(device, "typed", a, None, c, 4, 4.5)
    assert device.download(a)[0] == 7


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, np.float32, r"argument 0 is \*H, was given \*f"),
        (1, np.float64, r"argument 1 is \*f, was given \*d"),
        (3, 3.0, "argument 3 is i, was given d"),
        (3, True, "argument 3 is i, was given bool"),
        (3, np.int64(3), "argument 3 is i, was given int64"),
        (3, None, r"argument 3 is i, was given \*"),
        (3, 2**31, "argument 3 is an int, which 2147483648 does not"),
        (4, 4, "argument 4 is d, was given i"),
    ],
)
def test_an_argument_of_another_type_is_refused(device, at, wrong, message):
    args = [*(device.zeros((4,), dtype) for dtype in (np.uint16, np.float32, np.float64)), 3, 4.5]
    args[at] = device.zeros((4,), wrong) if isinstance(wrong, type) else wrong
    with pytest.raises(HostDeviceError, match=f"kernels.typed: {message}"):
        start(device, "typed", *args)


def test_other_misuses_of_launch_are_refused(device):
    p = device.zeros((4,), np.float32)
    for kernel, args, how, message in (
        ("write_at", (p,), {}, "takes 2 arguments, was given 1"),
        ("floating", (p, 1.0), {}, "argument 1 is f, was given d"),
        ("nothing", (p,), {}, "no such kernel"),
        ("write_at", (np.zeros(4, np.float32), 0), {}, "no array of this device"),
        ("write_at", (p.copy(), 0), {}, "no array of this device"),
        ("write_at", (p, 0), {"grid": (0,)}, "grid"),
        ("write_at", (p, 0), {"grid": (1, 65536)}, "grid"),
        ("write_at", (p, 0), {"grid": (1, 1, 1, 1)}, "grid"),
        ("write_at", (p, 0), {"block": (48,)}, "48 threads"),
        ("write_at", (p, 0), {"block": (1024, 2)}, "2048 threads"),
        ("write_at", (p, 0), {"block": (4, 1, 128)}, "block"),
        ("write_at", (p, 0), {"shared": (227 << 10) + 1}, "shared memory"),
    ):
        with pytest.raises(HostDeviceError, match=message):
            start(device, kernel, *args, **how)
    assert device.launches == []
    start(device, "write_at", p, 0, shared=227 << 10)
    assert device.launches == [Launch("kernels", "write_at", (1,), (32,), 227 << 10)]


def test_a_source_that_does_not_compile_shows_the_compilers_message():
    device = HostDevice(texts={"bad": '#line 7 "bad.cu"\nextern "C" __global__ void bad(int* p) { p = 1; }'})
    with pytest.raises(BuildError, match=r"bad\.cu:7:"):
        device.launch("bad", "bad", (), (1,), (32,), [None])


def test_what_runs_here_can_be_compiled_for_a_gpu_too(monkeypatch):
    wanted = []
    monkeypatch.setattr(hostdevice, "FILL_CACHE", "sm_90")
    monkeypatch.setattr(hostdevice, "cubin", lambda *args: wanted.append(args))
    device, defines = HostDevice(texts={"kernels": KERNELS}), ("STORAGE_FLOAT32",)
    p = device.zeros((4,), np.float32)
    for _ in range(2):
        device.launch("elementwise", "relu_packed", defines, (1,), (32,), (p, p, 4))
        start(device, "write_at", p, 0)
    assert wanted == [("elementwise", defines, "sm_90")]


# -- memory


def test_arrays_come_as_zeros_and_well_aligned_and_take_numbers_of_their_own_type(device):
    a = device.zeros((3, 5), np.uint16)
    assert a.ctypes.data % 256 == 0 and not a.any()
    host = np.arange(15, dtype=np.uint16)
    device.upload(a, host)
    host[:] = 0
    assert device.download(a).ravel().tolist() == list(range(15))
    with pytest.raises(HostDeviceError, match="upload"):
        device.upload(a, np.arange(15, dtype=np.int16))
    with pytest.raises(HostDeviceError, match="upload"):
        device.upload(a, np.arange(5, dtype=np.uint16))


def test_copy_and_zero_want_whole_arrays_of_the_device(device):
    a, b = array(device, np.ones((4, 6), np.float32)), device.zeros((24,), np.float32)
    device.copy(b, a)
    device.zero(a[1:])
    assert device.download(b).all() and device.download(a).sum() == 6
    for source in (a[:, :3], np.ones((4, 3), np.float32), device.zeros((11,), np.float32)):
        with pytest.raises(HostDeviceError, match="copy"):
            device.copy(b[:12], source)
    with pytest.raises(HostDeviceError, match="zero"):
        device.zero(a[:, 1:])


def test_later_is_the_array_as_it_was(device):
    a = array(device, np.arange(3))
    fetch = device.later(a)
    device.zero(a)
    assert fetch().tolist() == [0, 1, 2]


def test_memory_that_is_no_longer_used_is_free_again(device):
    free, total = device.memory()
    a = device.zeros((1000,), np.float64)[10:]
    assert device.memory()[0] <= free - 8000
    del a
    assert device.memory() == (free, total)


# -- recording


def test_a_recorded_work_repeats_its_launches_and_copies_without_python(device):
    a, b = device.zeros((3,), np.float32), device.zeros((3,), np.float32)
    calls = []

    def work():
        calls.append(len(calls))
        device.copy(b, a)
        start(device, "write_at", a, len(calls) % 3)

    recorded = device.record(work)
    recorded()
    assert device.download(a).tolist() == [0, 1, 0] and not device.download(b).any()
    recorded()
    assert device.download(a).tolist() == [0, 1, 1] and device.download(b).tolist() == [0, 1, 0]
    device.zero(a)
    recorded()
    recorded()
    assert calls == [0, 1]
    assert device.download(a).tolist() == [0, 0, 1] and device.download(b).tolist() == [0, 0, 1]
    assert len(device.launches) == 4


@pytest.mark.parametrize("what", ["zeros", "upload", "download", "later", "synchronize", "record"])
def test_what_a_graph_cannot_hold_is_refused_while_recording(device, what):
    a = device.zeros((3,), np.float32)
    forbidden = {
        "zeros": lambda: device.zeros((1,), np.float32),
        "upload": lambda: device.upload(a, np.ones(3, np.float32)),
        "download": lambda: device.download(a),
        "later": lambda: device.later(a),
        "synchronize": device.synchronize,
        "record": device.record(lambda: None),
    }[what]
    recorded = device.record(forbidden)
    recorded()
    with pytest.raises(HostDeviceError, match="cannot be recorded"):
        recorded()
    forbidden()


def test_the_fastest_is_found_once_per_key_and_never_where_results_must_repeat():
    for deterministic, order in ((True, "000"), (False, "0111")):
        device, ran = HostDevice(deterministic=deterministic), []
        candidates = [lambda: ran.append("0"), lambda: ran.append("1")]  # noqa: B023
        for _ in range(3):
            device.fastest("key", candidates)
        assert "".join(ran) == order
        assert device.choices == ({} if deterministic else {"key": 1})
        recorded = device.record(lambda: device.fastest("key", candidates))  # noqa: B023
        recorded()
        ran.clear()
        recorded()
        assert ran == [order[-1]]


# -- matmuls


def test_matmuls_have_all_epilogues(device):
    for types, transposed, (what, how) in itertools.product(
        TYPES, itertools.product((False, True), repeat=2), EPILOGUES.items()
    ):
        matmuls, kind = HostMatmul(device), Matmul(5, 8, 7, *transposed, *types, **how)
        host = operands(kind)
        arrays, right = {name: array(device, values) for name, values in host.items()}, expected(kind, host)
        matmuls.run(kind, **arrays)
        found = {name: device.download(values) for name, values in arrays.items()}
        agree(kind, found, right, where=f"{types}, {transposed}, {what}")
        assert matmuls.kinds == [kind]


def test_matmuls_are_planned_before_they_are_recorded_and_then_repeated(device):
    matmuls = HostMatmul(device)
    a, b, out = (array(device, np.full((2, 2), 1.0)) for _ in range(3))
    kind = Matmul(2, 2, 2, False, False, "float64", "float64", accumulate=True)
    unplanned = device.record(lambda: None if not device.recording else matmuls.run(kind, out, a, b))
    unplanned()
    with pytest.raises(HostDeviceError, match="planning cannot be recorded"):
        unplanned()
    recorded = device.record(lambda: matmuls.run(kind, out, a, b))
    for _ in range(4):
        recorded()
    assert np.all(device.download(out) == 9)


def test_matmuls_refuse_what_they_cannot_do(device):
    matmuls = HostMatmul(device, without={"dgelu"})
    a, b, out = (array(device, np.ones((2, 2), np.float32)) for _ in range(3))
    plain = Matmul(2, 2, 2, False, False, "float32", "float32")
    assert matmuls.can(plain) and matmuls.can(Matmul(2, 2, 2, True, False, "float32", "float32", "gelu"))
    without = Matmul(2, 2, 2, False, False, "float32", "float32", "dgelu")
    assert not matmuls.can(without)
    for kind, arrays, message in (
        (without, (out, a, b, None, a), "no way"),
        (Matmul(2, 2, 2, False, False, "float32", "float32", "bias", True), (out, a, b, b), "no way"),
        (plain, (out, out, b), "a overlaps out"),
        (plain, (out, a, b[:1]), r"b is float32\[1, 2\]"),
        (plain, (out, a, b.T), "b is float32"),
        (plain, (out, a, np.ones((2, 2), np.float32)), "no array of this device"),
        (plain, (out, a, b, b[0]), "were given"),
        (Matmul(2, 2, 2, False, False, "bfloat16", "float32"), (out, a, b), "a is float32"),
        (Matmul(2, 2, 2, False, False, "float32", "float32", "bias"), (out, a, b), "were given"),
    ):
        with pytest.raises(HostDeviceError, match=message):
            matmuls.run(kind, *arrays)

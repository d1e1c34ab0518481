import gc
import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import State, verify
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import checkpoints as saving
from distgpt.core.train.memory import copy_bytes
from distgpt.gpu import device as module
from distgpt.gpu.device import TIMED_CALLS, CupyDevice
from fakecupy import FakeCupy
from hostgpu import HostDevice, host_kernels

pytestmark = needs_the_processor

FLOAT = np.dtype(np.float32)
ONES = np.ones(2, FLOAT)
INCREASE = """
extern "C" __global__ void increase(float* p, int count, int by) {
    if (int(threadIdx.x) < count) p[threadIdx.x] += by;
}
"""


@pytest.fixture
def device():
    return HostDevice(deterministic=False, texts={"increase": INCREASE})


def increase(device, array, by=1):
    device.launch("increase", "increase", (), (1,), (32,), (array, array.size, by))


def measured(device, milliseconds):
    device.xp.cuda.get_elapsed_time = lambda start, end: milliseconds.pop(0)
    return milliseconds


def test_device_reports_its_place_and_memory():
    device = CupyDevice(2, xp=FakeCupy(devices=3))
    assert device.stream.non_blocking
    assert (device.name, device.capability, device.multiprocessors) == ("Fake GPU", (9, 0), 132)
    first, same, other = (CupyDevice(index, xp=FakeCupy(2)).place for index in (0, 0, 1))
    assert first == same != other
    device.xp.pool_bytes = 50
    assert device.memory() == (1050, 3000)


def test_source_is_compiled_once_per_defines(device, monkeypatch):
    compiled, cubin = [], device.xp.cubin
    monkeypatch.setattr(device.xp, "cubin", lambda *args: (compiled.append(args), cubin(*args))[1])
    for defines in (("X",), ("X",), ("X", "Y=2")):
        device.launch("increase", "increase", defines, (1,), (32,), (None, 0, 1))
    assert compiled == [("increase", defines, "sm_90") for defines in (("X",), ("X", "Y=2"))]
    with pytest.raises(OverflowError):
        increase(device, device.zeros((2,), FLOAT), 2**31)


@pytest.mark.parametrize("count", [1, module.MOST_COPIES, 3 * module.MOST_COPIES + 1])
def test_host_may_be_overwritten_after_upload(device, count):
    host, arrays = np.zeros(5, FLOAT), [device.zeros((5,), FLOAT) for _ in range(count)]
    for number, array in enumerate(arrays):
        host[:] = number + 1
        device.upload(array, host)
    host[:] = -1
    assert [device.download(array).tolist() for array in arrays] == [[n + 1] * 5 for n in range(count)]


def test_upload_waits_only_for_the_oldest(device):
    array = device.zeros((5,), FLOAT)
    for _ in range(module.MOST_COPIES):
        device.upload(array, np.ones(5, FLOAT))
    assert device.stream.finished == 0
    device.upload(array, np.ones(5, FLOAT))
    assert device.stream.finished == 2  # the zeros, and the first upload


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 101, 3003])
def test_large_copies_reuse_small_pieces(device, size, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 64)
    monkeypatch.setattr(module, "MOST_BYTES_DOWN", 64)
    array, host = device.zeros((size,), FLOAT), np.arange(size, dtype=FLOAT)
    device.upload(array, host)
    assert device.stream.begun == 1 + -(-size // 16)
    for _ in range(3):
        found = device.download(array)
        np.testing.assert_array_equal(found, host)
        assert found.base is None  # not a view of page-locked memory
    assert device.xp.pinned <= module.MOST_COPIES + 4
    assert {*device.xp.free_pinned} <= {512}, "larger pieces"


def test_invalid_copies_are_rejected(device):
    array = device.zeros((2, 3), FLOAT)
    device.upload(array, np.ones(6, FLOAT))
    for wrong in (np.ones(5, FLOAT), np.ones(6)):
        with pytest.raises(ValueError, match="does not fit"):
            device.upload(array, wrong)
    for copy in (device.download, device.to_host_async, lambda array: device.upload(array, ONES)):
        with pytest.raises(ValueError, match="not contiguous"):
            copy(array[:, 0])


def test_later_reads_at_its_point_of_the_stream(device):
    array, taken = device.zeros((2,), FLOAT), []
    for _ in range(3):
        increase(device, array)
        taken.append(device.to_host_async(array))
    device.zero(array)
    assert device.stream.finished == 0 and [take().tolist() for take in reversed(taken)] == [[3, 3], [2, 2], [1, 1]]
    assert device.download(array).tolist() == [0, 0]


def test_copy_memory_is_reused_only_when_done(device):
    """The pool reuses dropped memory of the same size."""
    array, other = device.zeros((2,), FLOAT), device.zeros((2,), FLOAT)
    device.to_host_async(array)  # never waited for
    gc.collect()
    mirror = device.mirror(other)
    mirror.host[:] = 5
    device.synchronize()
    assert mirror.host.tolist() == [5, 5]
    for _ in range(50):
        device.to_host_async(array)()
    assert device.xp.pinned < 5


def test_device_clears_memory_in_its_own_stream():
    """The device that was opened last owns CuPy's current stream."""
    xp = FakeCupy()
    first, second = CupyDevice(0, xp=xp), CupyDevice(0, xp=xp)
    array = first.zeros((4,), FLOAT)
    first.upload(array, np.arange(4, dtype=FLOAT))
    first.keep(array, lambda: first.zero(array))
    np.testing.assert_array_equal(first.download(array), np.arange(4))
    assert not second.stream.waiting and xp.current is second.stream


def test_recorded_work_is_run_then_captured_then_replayed(device):
    array, modes = device.zeros((2,), FLOAT), []

    def work():
        modes.append(device.recording)
        if len(modes) == 1:
            raise MemoryError("planted")
        increase(device, array)

    assert HostDevice(graphs=False).record(work) is work
    recorded = device.record(work)
    with pytest.raises(MemoryError):
        recorded()
    for n in range(1, 6):
        recorded()
        assert device.download(array).tolist() == [n, n]
    assert modes == [False, False, True]


@pytest.mark.parametrize("what, says", [
    (lambda device, array: device.zeros((3,), FLOAT), "while work is being recorded"),
    (lambda device, array: device.upload(array, ONES), "while work is being recorded"),
    (lambda device, array: device.to_host_async(array), "while work is being recorded"),
    (lambda device, array: device.mark(), "while work is being recorded"),
    (lambda device, array: device.synchronize(), "not permitted when stream is capturing"),
    (lambda device, array: device.keep(array, lambda: None), "during a capture"),
    (lambda device, array: 1 / 0, "division by zero"),
])  # fmt: skip
def test_unrecordable_work_fails_cleanly(device, what, says):
    """CUDA would accept some of these operations in CuPy's capture mode, so the device rejects them."""
    array, calls = device.zeros((2,), FLOAT), []

    def work():
        increase(device, array)
        if len(calls) == 1:
            what(device, array)

    recorded = device.record(work)
    recorded()
    calls.append(1)
    for _ in range(2):
        with pytest.raises((RuntimeError, ZeroDivisionError), match=says):
            recorded()
        assert not device.recording and device.stream.captured is None
    calls.append(1)
    recorded()
    recorded()
    device.upload(device.zeros((2,), FLOAT), ONES)
    assert device.download(array).tolist() == [3, 3]


def test_recorded_work_keeps_objects_alive(device):
    class Owner:
        def __init__(self):
            self.array = device.zeros((2,), FLOAT)

        def work(self):
            device.zero(self.array)

    owner = Owner()
    recorded, array = device.record(owner.work), weakref.ref(owner.array)
    recorded()
    recorded()
    del owner
    gc.collect()
    assert array() is not None
    del recorded
    gc.collect()
    assert array() is None


def test_fastest_is_found_once_per_key(device):
    calls = []
    candidates = [lambda i=i: calls.append(i) for i in range(3)]
    measured(device, [3, 1, 2])
    device.fastest("a", candidates)
    assert calls == [i for i in range(3) for _ in range(1 + TIMED_CALLS)] + [1]  # the others are far slower
    calls.clear()
    device.fastest("a", candidates)
    assert calls == [1]
    left = measured(device, [1, 2, 3])
    device.fastest("b", candidates)
    assert calls[-1] == 0 and not left and device.choices == {"a": 1, "b": 0}
    calls.clear()
    device.capture(lambda: [device.fastest(key, candidates) for key in ("a", "new")])
    assert calls == [1, 0]  # recording uses the known one, or the first
    calls.clear()
    HostDevice(deterministic=True).fastest("a", candidates)
    assert calls == [0]


def test_close_candidates_alternate_and_use_medians(device):
    calls = []
    candidates = [lambda i=i: calls.append(i) for i in range(3)]
    cold, turns = [10, 30, 12], [[8, 9], [8, 9], [99, 9], [11, 9], [12, 9]]
    measured(device, cold + [time for turn in turns for time in turn])
    assert device.times(candidates) == pytest.approx([ms / 1000 / TIMED_CALLS for ms in (11, 30, 9)])
    assert calls[:: 1 + TIMED_CALLS] == [0, 1, 2] + [0, 2] * len(turns)


def test_marks_wait_for_their_event(device):
    first, array = device.mark(), device.zeros((2,), FLOAT)
    device.upload(array, ONES)
    second = device.mark()
    measured(device, [250.0])
    assert second.seconds_since(first) == 0.25
    assert array.memory.tolist() == [1, 1]  # work before the mark is done


def test_keep_restores_the_contents(device):
    array, seen = device.array(np.array([3, 4], FLOAT)), []

    def work():
        increase(device, array)
        seen.append(device.download(array).tolist())

    device.keep(array, work)
    assert seen == [[4, 5]]
    assert array.memory.tolist() == [3, 4]  # `keep` waits


def peak_of(work):
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def model(request, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES_DOWN", 1 << 12)
    size = replace(preset("microgpt").model, n_layer=8, n_embd=request.param)
    model = Model(Architecture(size), host_kernels("float32"))
    model.allocate_master_weights()
    return model


@pytest.mark.parametrize("model", [16], indirect=True)
def test_copy_to_save_needs_the_counted_memory(model, monkeypatch):
    """The host memory is `copy_bytes`, and some pieces."""
    monkeypatch.setattr(saving, "COPIED_AT_ONCE", 1 << 10)
    settings = TrainConfig(save="async")
    optimizer, k = AdamW(model, settings), model.kernels
    k.put(model.weights.flat, np.arange(model.layout.size))
    copy, counted = saving.Copy(model), copy_bytes(RunConfig(model.config, settings), k)
    live = {"a": {"": model.weights}, "b": {"m/": optimizer.m, "v/": optimizer.v}}
    groups, peak = peak_of(lambda: copy.update(live))
    assert counted > 40 * (1 << 12)
    assert counted <= peak < counted + 16 * (1 << 12) + 40_000  # and Python's own objects
    found = np.concatenate([groups["a"][spec.name].reshape(-1) for spec in model.layout.specs])
    np.testing.assert_array_equal(np.sort(found), np.arange(model.layout.size))


@pytest.mark.parametrize("model", [64], indirect=True)
def test_sync_saving_needs_memory_of_one_tensor(model, tmp_path):
    settings, directory = TrainConfig(save="sync"), RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    about = Description(RunConfig(model=model.config), None)
    saver = saving.Checkpoints(model, AdamW(model, settings), directory, about, settings, print)
    saver.write_now(State(1))  # creates cached objects
    _, peak = peak_of(lambda: saver.write_now(State(2)))
    verify(directory.checkpoints / "step-00000002")
    assert peak < 2 * model.layout.size  # bytes, of 12 that weights and moments take

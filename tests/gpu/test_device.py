"""The device behind the GPU stages, on a CuPy that queues, captures and refuses as the real one does."""

import gc

import numpy as np
import pytest
from fakecupy import FakeCupy

from distgpt.gpu import device as module
from distgpt.gpu.device import CupyDevice

FLOAT = np.dtype(np.float32)


@pytest.fixture
def xp():
    return FakeCupy()


@pytest.fixture
def device(xp):
    return CupyDevice(0, xp=xp)


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, with a compiler that takes no time."""
    calls = []
    monkeypatch.setattr("distgpt.gpu.device.cubin", lambda *args: calls.append(args) or repr(args).encode())
    return calls


def start(device, kernel, *args, **how):
    device.launch("elementwise", kernel, ("STORAGE_FLOAT32",), (2, 3), (64,), args, **how)


def increase(array, by):
    array += by


# Opening


def test_all_work_goes_to_one_stream_of_the_chosen_device():
    xp = FakeCupy(devices=3)
    device = CupyDevice(2, xp=xp)
    assert xp.journal[:2] == [("Device.use", 2), ("Stream.use", device.stream)]
    assert device.stream.non_blocking
    assert (device.name, device.capability, device.multiprocessors) == ("Fake GPU", (9, 0), 132)
    a, b = device.zeros((3,), FLOAT), device.zeros((3,), FLOAT)
    device.upload(a, np.ones(3, FLOAT))
    device.copy(b, a)
    device.zero(a)
    device.download(b)
    used = {entry[-1] for entry in xp.journal if "_async" in entry[0] or entry[0] == "Event.record"}
    assert used == {device.stream}


def test_a_device_knows_its_place():
    first, same, other = (CupyDevice(index, xp=FakeCupy(2)).place for index in (0, 0, 1))
    assert first == same != other


def test_free_memory_is_also_what_the_pool_keeps(xp, device):
    xp.pool_bytes = 50
    assert device.memory() == (1050, 3000)


# Launches


def test_arguments_become_what_the_kernel_declares(xp, device, compiled):
    array = device.zeros((4,), FLOAT)
    start(device, "add", array, None, 7, 0.5, True, -(2**31), shared=100)
    ((name, grid, block, args, shared, stream),) = xp.calls("Function")
    assert (name, grid, block, shared, stream) == ("add", (2, 3), (64,), 100, device.stream)
    assert args[0] is array
    assert [(type(value), value) for value in args[1:]] == [
        (np.uint64, 0),
        (np.int32, 7),
        (np.float64, 0.5),
        (np.int32, 1),
        (np.int32, -(2**31)),
    ]
    with pytest.raises(OverflowError):
        start(device, "add", 2**31)


def test_a_source_is_compiled_and_loaded_once_for_its_defines(xp, device, compiled):
    for kernel, defines in (("a", ("X",)), ("b", ("X",)), ("a", ("X",)), ("a", ("X", "Y=2"))):
        device.launch("norm", kernel, defines, (1,), (32,), ())
    assert compiled == [("norm", ("X",), "sm_90"), ("norm", ("X", "Y=2"), "sm_90")]
    assert len(xp.calls("Module.load")) == 2
    assert [name for (name,) in xp.calls("Module.get_function")] == ["a", "b", "a"]
    assert len(xp.calls("Function")) == 4


# Copies


@pytest.mark.parametrize("count", [1, module.UPLOADS, 3 * module.UPLOADS + 1])
def test_the_host_may_be_overwritten_once_upload_returns(device, count):
    host, arrays = np.zeros(5, FLOAT), [device.zeros((5,), FLOAT) for _ in range(count)]
    for number, array in enumerate(arrays):
        host[:] = number + 1
        device.upload(array, host)
    host[:] = -1
    assert [device.download(array).tolist() for array in arrays] == [[n + 1] * 5 for n in range(count)]


def test_only_one_upload_too_many_waits_for_the_oldest(xp, device):
    array = device.zeros((5,), FLOAT)
    for _ in range(module.UPLOADS):
        device.upload(array, np.ones(5, FLOAT))
    assert "Event.synchronize" not in xp.names()
    finished = device.stream.finished
    device.upload(array, np.ones(5, FLOAT))
    assert xp.names().count("Event.synchronize") == 1
    assert device.stream.finished == finished + 2  # the zeros, and the first upload


def test_a_large_upload_goes_in_pieces(xp, device, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 64)
    host = np.arange(101, dtype=FLOAT)
    array = device.zeros((101,), FLOAT)
    device.upload(array, host)
    assert [size for _, size, _ in xp.calls("copy_from_host_async")] == [64] * 6 + [20]
    np.testing.assert_array_equal(device.download(array), host)


def test_uploads_refuse_what_does_not_fit(device):
    array = device.zeros((2, 3), FLOAT)
    device.upload(array, np.ones(6, FLOAT))
    for wrong in (np.ones(5, FLOAT), np.ones(6)):
        with pytest.raises(ValueError, match="does not fit"):
            device.upload(array, wrong)


def test_copies_in_one_piece_refuse_arrays_with_gaps(device):
    column = device.zeros((4, 4), FLOAT)[:, 0]
    for copy in (device.download, device.later, lambda array: device.upload(array, np.ones(4, FLOAT))):
        with pytest.raises(ValueError, match="not contiguous"):
            copy(column)


def test_later_sees_an_array_at_its_point_of_the_stream(xp, device, compiled):
    xp.kernels["increase"] = increase
    array = device.zeros((2,), FLOAT)
    taken = []
    for _ in range(3):
        start(device, "increase", array, 1)
        taken.append(device.later(array))
    device.zero(array)
    assert "Event.synchronize" not in xp.names()
    assert [take().tolist() for take in reversed(taken)] == [[3, 3], [2, 2], [1, 1]]
    assert device.download(array).tolist() == [0, 0]


def test_a_download_is_a_copy_of_its_own(device):
    array = device.zeros((2,), FLOAT)
    first = device.download(array)
    device.upload(array, np.ones(2, FLOAT))
    device.download(array)
    assert first.tolist() == [0, 0]
    assert first.base is None  # and so holds no page-locked memory


def test_what_nobody_waits_for_does_not_write_into_memory_of_others(device):
    """The pool lends out what was dropped, of the same size, to whoever asks next."""
    array, other = device.zeros((2,), FLOAT), device.zeros((2,), FLOAT)
    device.later(array)
    gc.collect()
    mirror = device.mirror(other)
    mirror.host[:] = 5
    device.synchronize()
    assert mirror.host.tolist() == [5, 5]


def test_memory_of_copies_that_are_done_is_lent_out_again(xp, device):
    array = device.zeros((2,), FLOAT)
    for _ in range(50):
        device.later(array)()
    assert len({id(block) for block in xp.free_pinned[512]}) + len(device._under_way._copies) < 5


def test_a_mirror_goes_back_and_forth(device):
    array = device.zeros((2, 2), FLOAT)
    mirror = device.mirror(array)
    assert (mirror.host.shape, mirror.host.dtype) == ((2, 2), FLOAT)
    mirror.host[...] = [[1, 2], [3, 4]]
    mirror.send()
    mirror.ready()
    mirror.host[...] = 0
    mirror.fetch()
    assert mirror.host.sum() == 0
    mirror.ready()
    assert mirror.host.tolist() == [[1, 2], [3, 4]]


def test_each_devices_memory_is_cleared_in_its_own_order(xp):
    """The last device that was opened owns CuPy's current stream; arrays of others are not its business."""
    first, second = CupyDevice(0, xp=xp), CupyDevice(0, xp=xp)
    array = first.zeros((4,), FLOAT)
    first.upload(array, np.arange(4, dtype=FLOAT))
    first.keep(array, lambda: first.zero(array))
    np.testing.assert_array_equal(first.download(array), np.arange(4))
    assert not second.stream.waiting and xp.current is second.stream

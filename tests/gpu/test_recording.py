"""Recorded work and measured time, on a CuPy that queues, captures and refuses as the real one does."""

import gc
import random
import weakref

import numpy as np
import pytest
from fakecupy import CudaError
from test_device import FLOAT, compiled, device, increase, start, xp  # noqa: F401

from distgpt.gpu.device import TIMED_CALLS, CupyDevice


def test_recorded_work_runs_then_is_captured_then_repeated(xp, device, compiled):
    xp.kernels["increase"] = increase
    array = device.zeros((2,), FLOAT)
    modes = []

    def work():
        modes.append(device.recording)
        start(device, "increase", array, 1)

    recorded = device.record(work)
    for n in range(1, 6):
        recorded()
        assert device.download(array).tolist() == [n, n]
    assert modes == [False, True]
    order = [
        name for name in xp.names() if name in ("Function", "begin_capture", "end_capture", "Graph.launch")
    ]
    assert order == ["Function", "begin_capture", "Function", "end_capture", *["Graph.launch"] * 4]


def test_without_graphs_work_is_done_each_time(xp):
    modes = []
    CupyDevice(0, graphs=False, xp=xp).record(lambda: modes.append(1))()
    assert modes == [1] and "begin_capture" not in xp.names()


def test_work_that_failed_at_first_is_run_again_before_it_is_recorded(xp, device):
    results = iter([True, False, False])

    def work():
        if next(results):
            raise MemoryError("planted")

    recorded = device.record(work)
    with pytest.raises(MemoryError):
        recorded()
    recorded()
    assert "begin_capture" not in xp.names()
    recorded()
    assert xp.names().count("begin_capture") == 1


ONES = np.ones(2, FLOAT)


@pytest.mark.parametrize(
    "what, says",
    [
        (lambda device, array: device.zeros((3,), FLOAT), "while work is being recorded"),
        (lambda device, array: device.upload(array, ONES), "while work is being recorded"),
        (lambda device, array: device.later(array), "while work is being recorded"),
        (lambda device, array: device.mirror(array), "while work is being recorded"),
        (lambda device, array: device.mark(), "while work is being recorded"),
        (lambda device, array: device.download(array), "while work is being recorded"),
        (lambda device, array: device.synchronize(), "not permitted when stream is capturing"),
        (lambda device, array: device.keep(array, lambda: None), "during a capture"),
        (lambda device, array: 1 / 0, "division by zero"),
    ],
)
def test_work_that_cannot_be_recorded_fails_and_leaves_the_device_usable(xp, device, compiled, what, says):
    """CUDA would let some of it pass, in the capture mode that CuPy chooses: the device itself refuses it."""
    xp.kernels["increase"] = increase
    array = device.zeros((2,), FLOAT)
    calls = []

    def work():
        start(device, "increase", array, 1)
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


def test_nothing_is_allocated_while_recording(xp, device, compiled):
    array = device.zeros((2,), FLOAT)

    def work():
        start(device, "increase", array, None, 1, 0.5)
        device.zero(array)
        device.copy(array, array)
        device.fastest("key", [lambda: start(device, "other", array), lambda: None])

    recorded = device.record(work)
    xp.milliseconds = [1, 2]
    recorded()
    blocks = xp.allocated
    recorded()
    recorded()
    assert xp.allocated == blocks


def test_a_recorded_work_keeps_what_it_needs_alive(device):
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


# Time


def test_the_fastest_is_found_once_per_key(xp, device):
    calls = []
    candidates = [lambda i=i: calls.append(i) for i in range(3)]
    xp.milliseconds = [3, 1, 2]
    device.fastest("a", candidates)
    assert calls == [i for i in range(3) for _ in range(1 + TIMED_CALLS)] + [1]  # the others are hopeless
    calls.clear()
    device.fastest("a", candidates)
    assert calls == [1]
    xp.milliseconds = [1, 2, 3]
    device.fastest("b", candidates)
    assert calls[-1] == 0 and not xp.milliseconds
    assert device.choices == {"a": 1, "b": 0}


def test_candidates_that_are_close_take_turns_and_their_median_counts(xp, device):
    calls = []
    candidates = [lambda i=i: calls.append(i) for i in range(3)]
    cold, turns = [10, 30, 12], [[8, 9], [8, 9], [99, 9], [11, 9], [12, 9]]
    xp.milliseconds = cold + [time for turn in turns for time in turn]
    assert device.times(candidates) == pytest.approx([ms / 1000 / TIMED_CALLS for ms in (11, 30, 9)])
    assert calls[:: 1 + TIMED_CALLS] == [0, 1, 2] + [0, 2] * len(turns)


def test_time_counts_from_the_second_call_to_the_end_of_the_last(xp, device):
    xp.milliseconds = [20]
    device.zeros((2,), FLOAT)
    marks = []
    assert device.seconds(lambda: marks.append(xp.names().count("Event.record"))) == 0.02 / TIMED_CALLS
    assert marks == [0] + [1] * TIMED_CALLS
    assert device.stream.finished == device.stream.begun


def test_marks_are_events_that_are_waited_for(xp, device):
    first, array = device.mark(), device.zeros((2,), FLOAT)
    device.upload(array, ONES)
    second = device.mark()
    xp.milliseconds = [250.0]
    assert second.seconds_since(first) == 0.25
    assert array.memory.tolist() == [1, 1]  # what lies before the mark is done
    assert xp.calls("Event.record")[-1] == (device.stream,)


def test_a_deterministic_device_times_nothing_and_takes_the_first(xp):
    device, calls = CupyDevice(0, deterministic=True, xp=xp), []
    device.fastest("a", [lambda: calls.append(0), lambda: calls.append(1)])
    assert calls == [0] and "Event.record" not in xp.names()


def test_while_recording_the_known_or_the_first_is_taken(xp, device):
    calls = []
    candidates = [lambda: calls.append(0), lambda: calls.append(1)]
    xp.milliseconds = [2, 1]
    device.fastest("known", candidates)
    calls.clear()
    device.capture(lambda: [device.fastest(key, candidates) for key in ("known", "new")])
    assert calls == [1, 0]


def test_keep_puts_the_old_contents_back(xp, device, compiled):
    xp.kernels["increase"] = increase
    array = device.zeros((2,), FLOAT)
    device.upload(array, np.array([3, 4], FLOAT))
    seen = []

    def work():
        start(device, "increase", array, 1)
        seen.append(device.download(array).tolist())

    device.keep(array, work)
    assert seen == [[4, 5]]
    assert array.memory.tolist() == [3, 4]  # at once, as `keep` waits


def test_the_stand_in_notices_a_wait_that_was_forgotten(xp, device):
    array = device.zeros((2,), FLOAT)
    device.upload(array, np.ones(2, FLOAT))
    mirror = device.mirror(array)
    mirror.fetch()
    assert mirror.host.tolist() != [1, 1]
    with pytest.raises(CudaError, match="measured nothing"):
        xp.cuda.get_elapsed_time(xp.cuda.Event(), xp.cuda.Event())


# Two streams in one capture


def forked(device, array, join=True, wait=True):
    """array ← 2 (array + 1) on two streams, the second one's work behind the first's."""
    side = device.second_stream()
    start(device, "increase", array, 1)
    if wait:
        device.after(side, device.stream)
    with device.on(side, aside=True):
        start(device, "double", array)
    if join:
        device.after(device.stream, side)


@pytest.mark.parametrize("hasty", [False, True])
def test_a_graph_of_two_streams_keeps_to_its_events(xp, device, compiled, hasty):
    xp.kernels.update(increase=increase, double=double)
    xp.hasty = hasty
    array = device.zeros((2,), FLOAT)
    graph = device.capture(lambda: [forked(device, array), start(device, "increase", array, 10)])
    for expected in (12, 36):
        graph.launch(device.stream)
        assert device.download(array).tolist() == [expected] * 2


def double(array):
    array *= 2


def test_without_events_a_graph_may_do_its_work_in_any_order(xp, device, compiled):
    xp.kernels.update(increase=increase, double=double)
    array, other = (device.zeros((2,), FLOAT) for _ in range(2))

    def work():
        side = device.second_stream()
        start(device, "increase", other, 1)
        device.after(side, device.stream)
        start(device, "increase", array, 1)
        with device.on(side, aside=True):
            start(device, "double", array)
        device.after(device.stream, side)

    graph, found = device.capture(work), []
    for xp.hasty in (False, True):
        device.zero(array)
        graph.launch(device.stream)
        found.append(device.download(array).tolist())
    assert found == [[2, 2], [1, 1]]
    xp.drawn, seen = random.Random(1), set()
    for _ in range(20):
        device.zero(array)
        graph.launch(device.stream)
        seen.add(device.download(array)[0])
    assert seen == {1, 2}


def test_a_capture_refuses_streams_that_are_not_joined_or_not_forked(xp, device, compiled):
    array = device.zeros((2,), FLOAT)
    with pytest.raises(CudaError, match="nothing waits for"):
        device.capture(lambda: forked(device, array, join=False))
    with pytest.raises(CudaError, match="work that is not"):
        device.capture(lambda: forked(device, array, wait=False))
    assert not device.recording and all(stream.captured is None for stream in xp.streams)
    before = xp.cuda.Event()
    device.capture(lambda: before.record(device.stream))
    with pytest.raises(CudaError, match="has ended"):
        device.stream.wait_event(before)

"""Captured work is bitwise identical to Python's calls, for changed contents of the arrays."""

import os
import signal
import threading
from functools import partial
from itertools import product

import numpy as np
import pytest
from distgpt.core.config import presets
from distgpt.core.cpu.graphs import capture
from distgpt.core.cpu.graphs.capture import OF_LOOPS, CapturedWork, GraphCapture, record
from distgpt.core.cpu.graphs.launch import Segment
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.pool import pool_of
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import Batches
from distgpt.core.data.loading import ArrayTokens
from distgpt.core.ops.api import IGNORE_INDEX, Affine, Head
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train.setup import make_steps
from distgpt.core.train.step import Step
from operations import *  # noqa: F403

KERNELS = [partial(CpuKernels, "float32"), Bfloat16Kernels]
NAMES = ["float32", "bfloat16"]


def arrays_in(values):
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, tuple | list):
            yield from arrays_in(value)


class Twice:
    """Kernels whose operations are captured with other numbers, and then repeated."""

    def __init__(self, kernels):
        self.own = kernels
        self.in_segments = set()

    def __getattr__(self, name):
        found = getattr(self.own, name)
        if name not in OF_LOOPS | {"linear_cross_entropy"}:
            return found

        def twice(*args, **named):
            given = list(arrays_in([*args, *named.values()]))
            contents = [array.copy() for array in given]
            work = CapturedWork(self.own, lambda: getattr(self.own, name)(*args, **named))
            for array in given:
                if array.dtype.kind != "i":
                    array[...] = 0
            work()
            for array, content in zip(given, contents, strict=True):
                array[...] = content
            work()
            if any(isinstance(entry, Segment) for entry in work.entries[True]):
                self.in_segments.add(name)

        return twice


@pytest.fixture(params=[pytest.param(KERNELS[0], marks=pytest.mark.ci), KERNELS[1]], ids=NAMES)
def both(request):
    kernels = request.param(3)
    kernels.record = partial(record, kernels)
    twice = Twice(kernels)
    yield Kernels("float64"), twice
    for name in OF_LOOPS:
        if request.node.name.startswith(f"test_{name}["):
            assert name in twice.in_segments, f"{name} was left to Python"


def steps_of(preset, threads, is_recorded, count=3, **changes):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 24, "vocab_size": 61, "batch_size": 6}
    run, works = presets.preset(preset, shape | {"steps": 8} | changes), []

    def noted(kernels, work):
        works.append(record(kernels, work) if is_recorded else work)
        return works[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capture, "record", noted)
        ids = np.random.default_rng(0).integers(0, 61, 2000, np.uint32)
        batches = Batches.of_run(ArrayTokens(ids), run)
        step = make_steps(run, open_stage("serial", threads), lambda text: None)
        read = [step.launch(number, batches).wait()[:2] for number in range(count)]
    entries = [each.entries.values() for each in works if isinstance(each, CapturedWork)]
    segments = [entry for of in entries for several in of for entry in several if isinstance(entry, Segment)]
    return read, step.model.weights.flat.copy(), len(segments)


GPT2 = {"bias": True, "norm": "layernorm", "positions": "learned", "mlp": "gelu", "optimizer": "adamw"}
RUNS = {
    "tiny": ("tiny", {}),
    "window": ("fast", {"window": 8}),
    "swiglu": ("tiny-adamw", {}),
    "gpt2": ("tiny-adamw", GPT2),
    "micro-batches": ("tiny", {"grad_accum": 2}),
    "every layer again": ("tiny", {"recompute": "block"}),
    "grouped heads": ("tiny-adamw", {"n_head": 4, "n_kv_head": 2}),
    "gains": ("tiny-adamw", {"qk_norm": True, "qk_norm_gain": True}),
    "uneven": ("tiny", {"batch_size": 5}),
}


@pytest.mark.parametrize("name, dtype, threads", [*product(RUNS, NAMES, [3]), ("tiny", "float32", 1)])
def test_captured_steps_are_bitwise_identical(name, dtype, threads):
    preset, changes = RUNS[name]
    plain, recorded = (steps_of(preset, threads, each, dtype=dtype, **changes) for each in (False, True))
    assert plain[2] == 0 and recorded[2] > 0 and plain[0] == recorded[0]
    np.testing.assert_array_equal(plain[1], recorded[1])


@pytest.mark.parametrize("changes, parts", [({}, 2), ({**GPT2, "positions": "rope"}, 1)])
def test_gradients_and_update_parts_are_segments(changes, parts):
    """Muon's update has two parts, with an exchange between them. The warm-up has also updated."""
    assert steps_of("tiny", 2, True, **changes)[2] == 1 + 2 * parts


def segments_of(threads, work, kernels):
    capture = GraphCapture(kernels, pool_of(threads))
    with capture.attached():
        work()
    return capture.entries


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 64])
def test_threads_meet_before_reading_results(threads):
    kernels = CpuKernels("float32", threads, "own")
    random = np.random.default_rng(0)
    first, second = (random.standard_normal((192, 192)).astype("float32") for _ in range(2))
    x, h, y, dw = (np.zeros((192, 192), "float32") for _ in range(4))

    def work():
        kernels.linear(h, x, Affine(first, None))  # written in rows
        kernels.linear_backward_weights(Affine(dw, None), h, x, False)  # reads all rows
        kernels.linear(y, dw, Affine(second, None))

    entries = segments_of(threads, work, kernels)
    for _ in range(20):
        x[...] = random.standard_normal(x.shape)
        work()
        wanted = y.copy()
        y[...] = np.nan
        for entry in entries:
            entry()
        np.testing.assert_array_equal(y, wanted)


def test_profile_of_operations_sees_captured_calls():
    kernels, x = CpuKernels("float32", 2), np.ones(8, "float32")
    work = record(kernels, lambda: kernels.add(x, x, x))
    work()
    seen = []
    kernels.add = lambda *args: seen.append(args)
    work()
    del kernels.add
    assert len(seen) == 1 and x.tolist() == [2] * 8
    work()
    assert x.tolist() == [4] * 8


def test_ignored_rows_are_read_per_call():
    kernels, random = CpuKernels("float32", 2), np.random.default_rng(0)
    x, w = (random.standard_normal((rows, 24)).astype("float32") for rows in (70, 31))
    targets = random.integers(0, 31, 70).astype(np.int32)
    head = Head(w, kernels.zeros(32, 31), 31)
    outs = [(kernels.zeros(70), kernels.zeros(70, 24), kernels.zeros(31, 24)) for _ in range(2)]
    plain, recorded = (lambda out=out: kernels.linear_cross_entropy(*out, x, head, targets, 1.0, False) for out in outs)
    again = CapturedWork(kernels, recorded)
    for left_out in ([], [3, 69], [], range(70)):
        targets[...] = random.integers(0, 31, 70)
        targets[list(left_out)] = IGNORE_INDEX
        plain()
        again()
        for wanted, found in zip(*outs, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_another_thread_computes_during_capture():
    kernels, others = CpuKernels("float32", 2), CpuKernels("float32", 2)  # one pool
    x, y, z = np.ones(1000, "float32"), np.zeros(1000, "float32"), np.zeros(1000, "float32")

    def work():
        kernels.add(y, x, x)
        other = threading.Thread(target=lambda: others.add(z, x, x))
        other.start()
        other.join()

    entries = segments_of(2, work, kernels)
    assert (z == 2).all() and not y.any()
    for entry in entries:
        entry()
    assert (y == 2).all()


def test_single_slice_is_split_among_threads():
    kernels = CpuKernels("float32", 4, "own")
    x, w, y = (np.ones((256, 64), "float32") for _ in range(3))
    w = w[:64]
    (segment,) = segments_of(4, lambda: kernels.each(lambda i: kernels.linear(y, x, Affine(w, None)), 1), kernels)
    assert all((program[:, 0] > 2).any() for program in segment.programs)


def test_pool_job_calls_without_capture():
    kernels = CpuKernels("float32", 2)
    x, totals = np.ones((2, 256), "float32"), np.zeros((2, 256), "float32")

    def work(i):
        kernels.add(totals[i], x[i], x[i])
        kernels.each(lambda part: kernels.add(totals[i], totals[i], x[i]), 2)

    recorded = [CapturedWork(kernels, partial(work, i)) for i in range(2)]
    finished = threading.Thread(target=lambda: kernels.each(lambda i: recorded[i](), 2), daemon=True)
    finished.start()
    finished.join(20)
    assert not finished.is_alive() and (totals == 4).all() and not recorded[0].entries


def test_gradient_hooks_run_per_call(monkeypatch):
    seen = []

    def launched(step, number, batches, original=Step.launch):
        if not seen:
            step.gradient_sync.ready = lambda final: step.model.kernels.between(lambda: seen.append((number, final)))
        return original(step, number, batches)

    monkeypatch.setattr(Step, "launch", launched)
    assert steps_of("tiny", 2, True, count=1)[2] > 5  # the gradients are cut
    assert len(seen) == 3  # two layers, then all


def test_signal_arrives_at_next_pause():
    kernels = CpuKernels("float32", 2)
    x, y = np.ones((64, 64), "float32"), np.zeros((64, 64), "float32")

    def work():
        kernels.each(lambda i: kernels.add(y[i], x[i], x[i]), 2)
        kernels.each(lambda i: kernels.add(y[i], y[i], x[i]), 2)

    (segment,) = segments_of(2, work, kernels)
    segment.at_pauses[0] = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        segment()
    assert y[:2].max() <= 3 and (y[0] == 2).all()  # the second half of thread 0 was not done
    segment.at_pauses[0] = lambda: None
    segment()
    assert (y[:2] == 3).all()


def test_single_operation_is_not_captured():
    kernels = CpuKernels("float32", 2)
    work = partial(kernels.zero, np.ones(3, "float32"))
    assert record(kernels, work) is work


def leaving_to_python(kernels):
    """Yield works with temporary arrays that a second call would not update."""
    x, y, w = np.ones(64, "float32"), np.zeros(64, "float32"), 2 * np.eye(8, dtype="float32")
    rows, out, indices = x.reshape(8, 8), y.reshape(8, 8), np.arange(64)
    yield x, y, lambda: kernels.add(y, x[indices], x)  # a copy, passed on as it is
    yield x, y, lambda: kernels.linear(out, rows[indices[:8]], Affine(w, None))  # a view of a copy
    yield x, y, lambda: kernels.each(lambda i: kernels.sum(y[i : i + 1], x[i : i + 1], 2, False), 64)
    yield x, y, lambda: y.__setitem__(..., 2 * x + kernels.zeros(3).sum())  # an operation that answers


@pytest.mark.parametrize("number", range(4))
def test_second_call_repeats_python_for_temporaries(number):
    kernels = CpuKernels("float32", 2)
    x, y, made = list(leaving_to_python(kernels))[number]
    work = CapturedWork(kernels, made)
    for value in (1.0, 2.0, 3.0):
        x[...] = value
        work()
        assert y.tolist() == [2 * value] * 64
    assert not isinstance(work.entries[True][0], Segment)


def test_views_are_captured():
    kernels = CpuKernels("float32", 2)
    x, y, w = np.ones(64, "float32"), np.zeros(64, "float32"), np.eye(8, dtype="float32")
    owned, rows = np.zeros(64, "float32").reshape(8, 8), x.reshape(8, 8)
    for kept in (
        lambda: kernels.add(y[:32], x[:32], x[32:]),
        lambda: kernels.linear(owned, rows, Affine(w, None)),
        lambda: kernels.linear(owned[:4], rows[:4], Affine(w, None)),
    ):
        work = CapturedWork(kernels, kept)
        work()
        assert isinstance(work.entries[True][0], Segment)
